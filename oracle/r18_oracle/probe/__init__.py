"""Finding what a function computes with, by numbers chosen so that the answer shows it.

`settle` is the whole story: which arrays the function takes, how fast it is, and its arithmetic.

| module    | question                                                | numbers                   |
|-----------|---------------------------------------------------------|---------------------------|
| `factors` | to which format are the factors of a product rounded?   | 1 + 2⁻ᵏ times 1           |
| `sums`    | how wide is the accumulator; does it round or cut off?  | B + s − B at random places |
| `order`   | in which order are products added?                      | FPRev: M, −M, and ones    |
| `fitted`  | which contract does an op without products keep?        | the kinds of random input |
| `transforms` | are 3×3 windows transformed, as Winograd does?       | a small weight next to 1  |

Sources: FPRev (arXiv 2411.00442) for `order`; Fasi, Higham, Mikaitis, Pranesh (PeerJ CS 7:e330,
2021) and Hickmann, Bradford (tensor cores by chosen inputs, PMBS 2019) for `sums`.

A probe sees the shapes that it poses. It finds the coarsest arithmetic over short and long sums,
few and many rows, and windows of one and of nine taps; the search then looks at all other shapes.
"""
