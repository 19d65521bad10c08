// How a linear is cut into tiles: the built-in choice, measured ones in its place, and the limits of both.
// No choice changes a result: every output element is summed over the whole k in one order (gemm.h).
#pragma once
#include <vector>

#include "common.h"

namespace octavo {

struct TileShape {
    int64_t row_tile = 0;     // rows of a tile at the most; they are shared out evenly among as few tiles as that allows
    int64_t column_tile = 0;  // packed columns of a tile
    int64_t regions = 1;      // of the output, whose tiles are claimed in turn
};

// The shape for the steps in which a linear has first_rows to last_rows rows.
struct TunedTile {
    int64_t first_rows = 0, last_rows = 0;
    TileShape shape;
};

// Throws std::invalid_argument unless the choice keeps within the matrix, the kernels' buffers and what the pool can count, and meets
// none of the `others`.
void check_tile(const LinearArgs& args, const TunedTile& tile, const std::vector<TunedTile>& others, int64_t max_rows, int threads);

// Sets the tiles of a step of `rows` rows: as measured where a choice covers them, else the built-in ones. Returns how many there are.
int64_t cut_linear(LinearArgs& args, int64_t rows, const std::vector<TunedTile>& tuned, int threads);

}  // namespace octavo
