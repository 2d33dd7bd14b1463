"""`r18 demo`: a picture classified, a planted bug found, the network timed next to PyTorch.

`parts` has the order; what needs PyTorch is in `heavy`, which a second process runs (`second`).

Registered by the entry-point group `r18.commands`, as another package's command would be.
`tools/draw_demo_picture.py` draws the picture.
"""
