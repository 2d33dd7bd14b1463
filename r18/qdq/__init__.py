"""Quantised networks as ONNX models of QuantizeLinear and DequantizeLinear nodes, out and in."""

from __future__ import annotations

from r18.qdq.model import NUMBERS, qdq_model, write_qdq

__all__ = ["NUMBERS", "qdq_model", "write_qdq"]
