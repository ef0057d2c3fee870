"""Trace rows selected by a mask as all rows plus the mask, and loops over experts as one op.

    i = torch.where(mask)[0]                    i[u0]
    y = expert(x[i]) * w[i, None]               y[u0, h]                                        as traced
    out.index_add_(0, i, y)                     out.index_add_(0, i, y)

    out.index_add_(0, arange(n), where(mask, expert(x) * w[:, None], 0))                        with all rows

torch itself carries the unknown number of rows, a symbol, through the ops. Then every op gets all rows, so that the
program has fixed sizes; rows that were not selected are left out where they would be written or summed. The result is
the same if every op in between works on each row separately: the rules (shardc.rules) know what may be split by rows.
Anything else is refused, and so is every use of the number of rows but as a size. Python may only test whether there
are any: then the answer is yes, since operations on no rows change nothing.

Sorted rows need no more than this: the rows from `ends[e - 1]` to `ends[e]` are those whose position is in between.

All experts on all rows is too much work by a factor of the number of experts, so the last step looks for steps that
differ only in parameters and masks. What it does not recognise stays right.

    trace.py        `SelectedRows`, the mode under which the model is traced: selections, numbers that Python reads
    branches.py     branches that are always taken, as tested on random choices (shardc.passes.canonical.choices)
    all_rows.py     the exported graph with all rows; writes, sums, means and losses of selected rows
    experts.py      loops over experts as one op
"""
