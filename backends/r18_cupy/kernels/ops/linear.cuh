// The shape of a linear layer: x (n, features), weight (out_features, features).
#pragma once

// The host's `LINEAR_SHAPE` in ops/linear.py mirrors it.
struct LinearShape {
  int n, features, out_features;
};
