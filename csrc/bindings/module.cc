#include "bindings/common.h"

PYBIND11_MODULE(_native, m) {
  m.doc() = "Kernels of megatron_sft_idx: arrays in, arrays out, GIL released.";
  bind_shard(m);
  bind_chat(m);
  bind_packing(m);
  bind_training(m);
  bind_formats(m);
  bind_verify(m);
  bind_storage(m);
}
