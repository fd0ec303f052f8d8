"""One rank under torchrun, for the runs of ``pretrain_runs``. Processes that it spawns do not repeat the imports."""

import sys

if __name__ == "__main__":
    from pretrain_runs import main

    main(*sys.argv[1:])
