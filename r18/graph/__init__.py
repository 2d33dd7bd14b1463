"""The network as data: ops and their problems, precisions, schedules, and passes over schedules.

Everything here is pure: no backend, no device, no file.
"""
