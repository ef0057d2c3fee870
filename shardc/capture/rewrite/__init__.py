"""Rewrite the result of torch.export, and calls that it loses, as a graph can contain them.

autograd_function       custom autograd Functions keep their backward; inner_autograd: derivatives within forward
inline_regions          `with torch.no_grad()` in a graph, and the casts of autocast
inplace_ops             in-place ops become their functional_twins; view_writes: those that write through views
flex_attention          FlexAttention as ops; attention_sinks: scores of each head beside those of keys
"""
