"""The cells of nn.LSTM and nn.GRU, which torch takes as one kernel from every accelerator; here as the CPU has them.

Each keeps in a workspace what its backward needs; the layout is our own, since only these functions read it.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor
_Bias = Tensor | None


def lstm_cell(
    input_gates: Tensor, hidden_gates: Tensor, cx: Tensor, input_bias: _Bias = None, hidden_bias: _Bias = None
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of an LSTM: hidden state, cell state, workspace."""
    gates = _biased(input_gates, input_bias) + _biased(hidden_gates, hidden_bias)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def lstm_cell_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the gates, of the cell state before, and of the bias (nothing without one)."""
    i, f, g, o = workspace.chunk(4, 1)
    squashed = cy.tanh()
    of_hy = torch.zeros_like(cy) if grad_hy is None else grad_hy
    of_cy = of_hy * o * (1 - squashed * squashed)
    if grad_cy is not None:
        of_cy = of_cy + grad_cy
    of_gates = torch.cat(
        [
            of_cy * g * i * (1 - i),
            of_cy * cx * f * (1 - f),
            of_cy * i * (1 - g * g),
            of_hy * squashed * o * (1 - o),
        ],
        1,
    )
    return of_gates, of_cy * f, of_gates.sum(0) if has_bias else of_gates.new_empty(0)


def gru_cell(
    input_gates: Tensor, hidden_gates: Tensor, hx: Tensor, input_bias: _Bias = None, hidden_bias: _Bias = None
) -> tuple[Tensor, Tensor]:
    """One step of a GRU: hidden state, workspace."""
    ir, ii, inew = _biased(input_gates, input_bias).chunk(3, 1)
    hr, hi, hnew = _biased(hidden_gates, hidden_bias).chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (ii + hi).sigmoid()
    n = (inew + r * hnew).tanh()
    return (hx - n) * z + n, torch.cat([r, z, n, hx, hnew], 1)


def gru_cell_backward(
    grad_hy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of both kinds of gates, of the hidden state before, and of both biases (nothing without)."""
    r, z, n, hx, hnew = workspace.chunk(5, 1)
    of_n = grad_hy * (1 - z) * (1 - n * n)
    of_r = of_n * hnew * r * (1 - r)
    of_z = grad_hy * (hx - n) * z * (1 - z)
    of_input, of_hidden = torch.cat([of_r, of_z, of_n], 1), torch.cat([of_r, of_z, of_n * r], 1)
    if has_bias:
        return of_input, of_hidden, grad_hy * z, of_input.sum(0), of_hidden.sum(0)
    return of_input, of_hidden, grad_hy * z, of_input.new_empty(0), of_hidden.new_empty(0)


def _biased(gates: Tensor, bias: _Bias) -> Tensor:
    return gates if bias is None else gates + bias
