"""Generate tokens, one after the other.

program     the programs by which a model generates, and the state that they keep
prompts     prompts of several lengths as one batch
sampling    the options; the next token of logits that may be split: greedy, or by counters, the same on every mesh
runtime     the programs of an engine, and the loop over tokens
compiler    compiles the programs, once for each of the sizes
capture     the model's forwards of prompts and of tokens; cache: the cache of a model of transformers
"""
