"""The sums of squares of gradients, which the strips of a row exchange."""

import torch

from recapp.optim.rules import sgd


def square_sums(kernels, gradients, width, links, dtype):
    """Return the sum of squares of each row's gradient, [U], of rows that do not matter."""
    row_U = torch.arange(links.bags, device=gradients.device)
    weights_RD = torch.zeros(links.bags, width, device=gradients.device)
    return kernels.row_squares(gradients, links, row_U, weights_RD, [], dtype, 0.1, sgd())[0]
