"""Names of row fields in public data sets, by content. If a row has several of them, the first one counts."""

from __future__ import annotations

from typing import Final

TURNS: Final = ("messages", "conversations", "conversation")
PROMPTS: Final = ("instruction", "prompt", "query", "question")
INPUTS: Final = ("input", "context")
ANSWERS: Final = ("output", "response", "completion", "answer")
HISTORY: Final = "history"
REASONING: Final = "reasoning_content"
SYSTEMS: Final = ("system", "system_prompt")
TOOLS: Final = ("tools", "functions")
CHOSEN: Final = ("chosen", "chosen_response", "chosen_messages")
REJECTED: Final = ("rejected", "rejected_response", "rejected_messages")
VERDICTS: Final = ("label", "kto_tag")
# Fields that control which tokens are trained on.
MASKS: Final = ("loss_mask", "labels", "assistant_masks", "completion_mask", "loss_scale", "loss_weights")
IMAGES: Final = ("images", "image", "image_url")
AUDIOS: Final = ("audios", "audio", "input_audio")
VIDEOS: Final = ("videos", "video")
MEDIA: Final = (*IMAGES, *AUDIOS, *VIDEOS)
# Keys of a question and its answer in a turn that contains both.
PAIRS: Final = ((("human", "user"), ("assistant", "gpt", "bot")), (("input",), ("output",)))
# Text that is trained on unchanged.
TEXT: Final = "text"
# Answers and prompts with names of single data sets (``chat_rows``).
OTHER_PROMPTS: Final = ("problem", "inputs")
OTHER_ANSWERS: Final = ("generated_solution", "attempt", "answers", "targets", "target")
# Reasoning in a separate column, of s1K.
THINKING: Final = "thinking_trajectories"
TEMPLATE_VARIABLES: Final = "chat_template_kwargs"
