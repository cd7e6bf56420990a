// report_order.h - what the order of image and video tokens does to a head: the curve over one frame, the true map and
// the figures, row by row and along the curve.
#ifndef SPARGE_CLI_REPORT_ORDER_H_
#define SPARGE_CLI_REPORT_ORDER_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "cli/loaded_call.h"
#include "cli/report_picture.h"

namespace sparge::cli {

// One head with its tokens in one order.
struct OrderedHead {
  double sparsity = 0, relative_l1 = 0;
  Image map;  // true masses
};

struct OrderReport {
  io::GridSides sides;
  bool hilbert_in_force = false;
  // A corner of the first frame: how many tokens of the grid come before each of its cells on the curve, row by row.
  int64_t width = 0, height = 0;
  std::vector<int64_t> rank;
  OrderedHead raster, hilbert;  // of the first head
};

// Nothing if the tokens have no grid, or cannot be reordered.
std::optional<OrderReport> CompareOrders(const Context& context, const LoadedCall& call);

}  // namespace sparge::cli
#endif  // SPARGE_CLI_REPORT_ORDER_H_
