"""Evaluation: a backend and a reference over a folder of photographs, image by image.

`sources` finds the images and their labels, `decode` reads them, `pair` runs both programs,
`journal` keeps what is done, `summary` counts agreement, `tables` writes it, `run` is the way
through all of these, and `distributed` sends the batches to workers.
"""
