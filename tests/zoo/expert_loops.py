"""Layers of experts as loops, in the styles of public codes, written from memory.

Each layer takes [batch, sequence, HIDDEN] and gives the like; `Model` is one of them between an embedding and a loss.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN, INNER, EXPERTS, CHOICES, VOCAB = 8, 12, 4, 2, 16


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(HIDDEN, INNER, bias=False)
        self.w2 = nn.Linear(INNER, HIDDEN, bias=False)
        self.w3 = nn.Linear(HIDDEN, INNER, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(HIDDEN, INNER), nn.ReLU(), nn.Linear(INNER, HIDDEN), nn.Dropout(0.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]


class Mixtral(nn.Module):
    """transformers <= 4.50: a mask of experts by choices by tokens, index_add_."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList([Expert() for _ in range(EXPERTS)])

    def forward(self, hidden_states: Tensor) -> Tensor:
        batch_size, sequence_length, hidden_dim = hidden_states.shape
        hidden_states = hidden_states.view(-1, hidden_dim)
        router_logits = self.gate(hidden_states)
        routing_weights = F.softmax(router_logits, dim=1, dtype=torch.float)
        routing_weights, selected_experts = torch.topk(routing_weights, CHOICES, dim=-1)
        routing_weights /= routing_weights.sum(dim=-1, keepdim=True)
        routing_weights = routing_weights.to(hidden_states.dtype)
        final_hidden_states = torch.zeros(
            (batch_size * sequence_length, hidden_dim), dtype=hidden_states.dtype, device=hidden_states.device
        )
        expert_mask = F.one_hot(selected_experts, num_classes=EXPERTS).permute(2, 1, 0)
        for expert_idx in range(EXPERTS):
            expert_layer = self.experts[expert_idx]
            idx, top_x = torch.where(expert_mask[expert_idx])
            current_state = hidden_states[None, top_x].reshape(-1, hidden_dim)
            current_hidden_states = expert_layer(current_state) * routing_weights[top_x, idx, None]
            final_hidden_states.index_add_(0, top_x, current_hidden_states.to(hidden_states.dtype))
        return final_hidden_states.reshape(batch_size, sequence_length, hidden_dim)


class Listed(Mixtral):
    """The first Mixtral, and Jambas in plain torch: rows of an expert become Python lists before they are an index."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        shape, hidden_states = hidden_states.shape, hidden_states.flatten(0, 1)
        weights, chosen = torch.topk(F.softmax(self.gate(hidden_states), dim=1), CHOICES, dim=-1)
        expert_mask = F.one_hot(chosen, num_classes=EXPERTS).permute(2, 1, 0)
        final = torch.zeros_like(hidden_states)
        for expert_idx in range(EXPERTS):
            idx, top_x = torch.where(expert_mask[expert_idx])
            if top_x.shape[0] == 0:
                continue
            top_x_list, idx_list = top_x.tolist(), idx.tolist()
            current_state = hidden_states[None, top_x_list].reshape(-1, HIDDEN)
            current = self.experts[expert_idx](current_state) * weights[top_x_list, idx_list, None]
            final.index_add_(0, top_x, current.to(hidden_states.dtype))
        return final.reshape(shape)


class Qwen(nn.Module):
    """Only experts that were hit, a shared expert beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList([Expert() for _ in range(EXPERTS)])
        self.shared_expert = Expert()
        self.shared_expert_gate = nn.Linear(HIDDEN, 1, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        b, s, h = hidden_states.shape
        hidden_states = hidden_states.view(-1, h)
        w = F.softmax(self.gate(hidden_states), dim=1)
        w, selected = torch.topk(w, CHOICES, dim=-1)
        final = torch.zeros((b * s, h), dtype=hidden_states.dtype)
        mask = F.one_hot(selected, num_classes=EXPERTS).permute(2, 1, 0)
        expert_hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for expert_idx in expert_hit:
            expert_layer = self.experts[expert_idx]
            idx, top_x = torch.where(mask[expert_idx].squeeze(0))
            if top_x.numel() == 0:
                continue
            cur = hidden_states[None, top_x].reshape(-1, h)
            cur = expert_layer(cur) * w[top_x, idx, None]
            final.index_add_(0, top_x, cur.to(hidden_states.dtype))
        shared = torch.sigmoid(self.shared_expert_gate(hidden_states)) * self.shared_expert(hidden_states)
        return (final + shared).reshape(b, s, h)


class Switch(nn.Module):
    """Top 1, boolean masks of a 3-d tensor, put back by mask."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleDict(
            {
                f"expert_{i}": nn.Sequential(
                    nn.Linear(HIDDEN, INNER, bias=False), nn.ReLU(), nn.Linear(INNER, HIDDEN, bias=False)
                )
                for i in range(EXPERTS)
            }
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        probs = F.softmax(self.classifier(hidden_states), dim=-1)
        index = torch.argmax(probs, dim=-1)
        router_mask = F.one_hot(index, EXPERTS)
        top = torch.max(probs, dim=-1).values.unsqueeze(-1)
        next_states = torch.zeros_like(hidden_states)
        for i, expert in enumerate(self.experts.values()):
            tokens = router_mask[:, :, i].bool()
            next_states[tokens] = expert(hidden_states[tokens]).to(next_states.dtype)
        return top * next_states


class SwitchHit(Switch):
    """transformers' Switch: a capacity, tokens without an expert stay as they are."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        probs = F.softmax(self.classifier(hidden_states), dim=-1)
        index = torch.argmax(probs, dim=-1)
        router_mask = F.one_hot(index, EXPERTS)
        # at most 3 tokens of a sequence for each expert
        router_mask = router_mask * (torch.cumsum(router_mask, dim=-2) <= 3)
        top = torch.max(probs, dim=-1).values.unsqueeze(-1)
        next_states = hidden_states.clone()
        router_mask = router_mask.bool()
        idx_mask = router_mask.reshape(-1, EXPERTS).sum(dim=0)
        idx_mask = torch.nonzero(idx_mask, as_tuple=True)[0].tolist()
        for i in idx_mask:
            next_states[router_mask[:, :, i]] = getattr(self.experts, f"expert_{i}")(
                hidden_states[router_mask[:, :, i]]
            )
        return top * next_states


class JetMoe(nn.Module):
    """Rows sorted by expert, split by counts; stacked weights."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.input = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, HIDDEN) / 3)
        self.output = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER) / 3)

    def parallel(self, x: Tensor, w: Tensor, size: list[int]) -> Tensor:
        xs = x.split(size, dim=0)
        return torch.cat([F.linear(xs[i], w[i]) for i in range(EXPERTS)], dim=0)

    def forward(self, layer_input: Tensor) -> Tensor:
        b, s, h = layer_input.shape
        layer_input = layer_input.reshape(-1, h)
        logits = self.router(layer_input).float()
        top_logits, top_indices = logits.topk(CHOICES, dim=1)
        gates = torch.softmax(top_logits, dim=1).type_as(layer_input)
        zeros = torch.zeros([gates.size(0), EXPERTS], dtype=gates.dtype)
        size = zeros.scatter(1, top_indices, 1).long().sum(0).tolist()
        flat = top_indices.flatten()
        _, order = flat.sort(0)
        batch_index = order.div(CHOICES, rounding_mode="trunc")
        batch_gates = gates.flatten()[order]
        x = layer_input[batch_index]
        hid = self.parallel(x, self.input, size)
        a, g = hid.chunk(2, dim=-1)
        y = self.parallel(F.silu(a) * g, self.output, size)
        y = y * batch_gates[:, None]
        z = torch.zeros((b * s, h), dtype=y.dtype)
        return z.index_add(0, batch_index, y).view(b, s, h)


class Nano(nn.Module):
    """makeMoE: a mask for each expert, += under it, only if there are tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.route = nn.Linear(HIDDEN, EXPERTS)
        self.experts = nn.ModuleList([MLP() for _ in range(EXPERTS)])

    def forward(self, x: Tensor) -> Tensor:
        logits = self.route(x)
        top, indices = logits.topk(CHOICES, dim=-1)
        sparse = torch.full_like(logits, float("-inf")).scatter(-1, indices, top)
        gating = F.softmax(sparse, dim=-1)
        final = torch.zeros_like(x)
        flat_x, flat_g = x.view(-1, x.size(-1)), gating.view(-1, gating.size(-1))
        for i, expert in enumerate(self.experts):
            mask = (indices == i).any(dim=-1)
            flat_mask = mask.view(-1)
            if flat_mask.any():
                out = expert(flat_x[flat_mask])
                scores = flat_g[flat_mask, i].unsqueeze(1)
                final[mask] += (out * scores).squeeze(1)
        return final


class DeepSeek(nn.Module):
    """DeepSeek-V3's own inference code: counts, `continue`, y[idx] += ..."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList([Expert() for _ in range(EXPERTS)])
        self.shared = Expert()

    def forward(self, hidden_states: Tensor) -> Tensor:
        shape = hidden_states.shape
        x = hidden_states.view(-1, shape[-1])
        scores = self.gate(x).softmax(dim=-1)
        topk_weight, topk_ids = torch.topk(scores, CHOICES, dim=-1, sorted=False)
        counts = torch.bincount(topk_ids.flatten(), minlength=EXPERTS).tolist()
        y = torch.zeros_like(x)
        for i in range(EXPERTS):
            if counts[i] == 0:
                continue
            expert = self.experts[i]
            idx, top = torch.where(topk_ids == i)
            y[idx] += expert(x[idx]) * topk_weight[idx, top, None]
        return (y + self.shared(x)).view(shape)


class DeepSeekSorted(DeepSeek):
    """DeepSeek-V2's moe_infer: sorted tokens, counts as numpy, slices, cat."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        shape = hidden_states.shape
        x = hidden_states.view(-1, shape[-1])
        scores = self.gate(x).softmax(dim=-1)
        topk_weight, topk_ids = torch.topk(scores, CHOICES, dim=-1, sorted=False)
        cnts = topk_ids.new_zeros((topk_ids.shape[0], len(self.experts)))
        cnts.scatter_(1, topk_ids, 1)
        tokens_per_expert = cnts.sum(dim=0)
        idxs = topk_ids.view(-1).argsort()
        sorted_tokens = x[idxs // topk_ids.shape[1]]
        tokens_per_expert = tokens_per_expert.cpu().numpy()
        outputs = []
        start_idx = 0
        for i, num_tokens in enumerate(tokens_per_expert):
            end_idx = start_idx + num_tokens
            if num_tokens == 0:
                continue
            outputs.append(self.experts[i](sorted_tokens[start_idx:end_idx]))
            start_idx = end_idx
        outs = torch.cat(outputs, dim=0) if len(outputs) else sorted_tokens.new_empty(0)
        new_x = torch.empty_like(outs)
        new_x[idxs] = outs
        final = (
            new_x.view(*topk_ids.shape, -1)
            .type(topk_weight.dtype)
            .mul_(topk_weight.unsqueeze(dim=-1))
            .sum(dim=1)
            .type(new_x.dtype)
        )
        return (final + self.shared(x)).view(shape)


class Model(nn.Module):
    def __init__(self, moe: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.mix = nn.Linear(HIDDEN, HIDDEN)
        self.moe = moe()
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + torch.tanh(self.mix(x.cumsum(1)))
        x = x + self.moe(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.roll(-1, 1).flatten())


STYLES: dict[str, type[nn.Module]] = {
    c.__name__: c for c in (Mixtral, Listed, Qwen, Switch, SwitchHit, JetMoe, Nano, DeepSeek, DeepSeekSorted)
}
