"""Show programs, for `shardc inspect`: functions from a Program to text, tables, JSON or one page.

comm, cost, timeline    collectives by axis and cause; memory over a step; when each rank computes or waits
trace, memory_snapshot  a step as a trace for Perfetto; its memory as a snapshot for torch's viewer
attention_scores        the part of attention's scores that each rank computes
kept_activations        what forward keeps for backward, layer by layer, and why
page                    a program as one interactive HTML file, and all drawing
coverage, rule_table    ops of a model without a rule; all rules, and the results of their check
comparison, aligned     a run and its prediction; columns of text
"""
