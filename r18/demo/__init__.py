"""`r18 demo`: a picture classified, timed next to PyTorch, and a planted bug found.

Registered by the entry-point group `r18.commands`, as another package's command would be.
`tools/draw_demo_picture.py` draws the picture.
"""
