"""Make training rows of chats and documents, with the tokenizer of a transformers model (docs/how-to/text.md).

records     reads files and datasets, and conversations in their usual forms
chat_masks  tokens of a conversation, and which of them the assistant wrote
packing     packs conversations into rows, by best fit decreasing in a window
rows        `chats`, `documents`: a dataset of packed rows, with counts and a digest; `example`: a batch of their form
mixture     `mix`: several datasets as one, by weights
scaffold    the model file and the spec of `shardc init`
"""
