// What every kernel of a linear layer is told: x (n, features), weight (out_features, features).
#pragma once

// The host's `LINEAR_SHAPE` in linear.py mirrors it.
struct LinearShape {
  int n, features, out_features;
};
