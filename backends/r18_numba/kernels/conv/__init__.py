"""Convolutions: direct, implicit GEMM and Winograd's F(2×2, 3×3), and the tile product."""
