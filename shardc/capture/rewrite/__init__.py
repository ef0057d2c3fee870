"""What torch's export gives, written otherwise, so that a graph can hold it.

autograd_function       custom autograd Functions keep their backward; inner_autograd: derivatives within forward
inline_regions          `with torch.no_grad()` in a graph, and the casts of autocast
inplace_ops             ops in place become their functional_twins; view_writes: those that write through views
flex_attention          FlexAttention as ops; attention_sinks: scores of each head beside those of keys
"""
