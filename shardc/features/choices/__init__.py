"""Record and replay a model's discrete choices (`choices`): experts of a router, keys of an attention, drawn tokens.

section     `choices`: which modules' choices are recorded or replayed
passes      the pass that makes a choice an output or an input of the program
program     what a program stores of them
runtime     fits given choices to a program's inputs, and checks them
files       choices of a run in files, by sample
"""
