"""Write model cards, and upload folders of weights to the Hugging Face hub.

card      README.md of a folder of weights: base, data, spec, mesh, steps, loss, versions
upload    makes the repository before a run, and uploads weights, config, tokenizer and card after it
"""
