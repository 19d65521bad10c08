// Built-in and measured tile shapes of linears.
#include "tiles.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "kernel_table.h"
#include "thread_pool.h"

namespace octavo {

namespace {

constexpr int64_t kRowUnit = 6;  // rows of the tallest register tile: a multiple leaves no short ones behind

// The narrowest tile. A quantised output group must lie inside one; of packed columns that are halved it takes twice as many.
int64_t least_columns(const LinearArgs& args) {
    const int64_t group = args.out.form == Act::I8 ? std::max(args.out.group, 2 * kPanel) : kPanel;
    return std::max<int64_t>(halves_columns(args.epilogue) ? 2 * group : group, 2 * kPanel);
}

// Columns of a tile: those with which the last thread ends first. Its tiles cost what reading their weights costs, or with more than a
// few rows the arithmetic, and each claim as much as reading kClaimBytes (all measured with 1 to 64 rows of every form). There are several
// tiles a thread, so that one that is held up delays the others by a part of its share only.
int64_t built_in_columns(const LinearArgs& args, int64_t rows, int64_t row_tile, int threads) {
    constexpr double kClaimBytes = 6 << 10, kRowsPerRead = 2.5;
    const WeightView& w = args.w;
    const bool few = rows <= 24, floats = w.form == Form::F32 || w.form == Form::BF16;
    const int64_t scale_bytes = w.groups * (w.scale_f16 ? 2 : 4) * (w.minimums ? 2 : 1);
    const double column_cost = (double)(w.panel_bytes / kPanel + scale_bytes) * std::max(1.0, (double)row_tile / kRowsPerRead);
    // The float kernels lost 1 to 2 % with wide tiles of many rows.
    const int64_t least = least_columns(args), most = floats && rows > 8 ? kColumnTile : rows <= kMaxRowTile ? 512 : 128;
    int64_t best = least;
    double best_cost = 0;
    for (int64_t columns = least; columns <= most; columns += least) {
        const int64_t across = ceil_div(w.columns, columns), tiles = ceil_div(rows, row_tile) * across, rounds = ceil_div(tiles, threads);
        if (columns > least && tiles < (few ? 2 : 4) * threads) break;
        int64_t longest = rounds * columns;
        if (tiles == across && (tiles - 1) % threads == 0) longest += w.columns - across * columns;  // the last tile is the short one
        const double cost = (double)longest * column_cost + (double)rounds * kClaimBytes;
        if (columns == least || cost < best_cost) best = columns, best_cost = cost;
    }
    return best;
}

TileShape built_in(const LinearArgs& args, int64_t rows, int threads) {
    constexpr int64_t kEnoughRows = 48;  // for the weights to be worth reading
    // As many row tiles for each thread, and none of a few rows only. Rows are shared out when columns alone give too few tiles: tall
    // narrow tiles were 2 to 8 % faster than short wide ones at 40 and 64 rows.
    int64_t tiles = ceil_div(rows, kMaxRowTile);
    if (tiles > 1 && round_up(tiles, threads) * kEnoughRows <= rows) tiles = round_up(tiles, threads);
    int64_t row_tile = tiles == 1 ? rows : std::min<int64_t>(round_up(ceil_div(rows, tiles), kRowUnit), kMaxRowTile);
    auto count = [&] { return ceil_div(rows, row_tile) * ceil_div(args.w.columns, least_columns(args)); };
    while (count() < 8 * threads && row_tile > 24) row_tile = round_up(ceil_div(row_tile, 2), kRowUnit);
    return {row_tile, built_in_columns(args, rows, row_tile, threads), threads};
}

}  // namespace

void check_tile(const LinearArgs& args, const TunedTile& tile, const std::vector<TunedTile>& others, int64_t max_rows, int threads) {
    auto within = [](const char* what, int64_t value, int64_t least, int64_t most, int64_t multiple) {
        if (value >= least && value <= most && value % multiple == 0) return;
        std::string limit = std::to_string(least) + " to " + std::to_string(most);
        if (multiple > 1) limit += " in steps of " + std::to_string(multiple);
        throw std::invalid_argument(std::string(what) + " of a tile must be " + limit + ", got " + std::to_string(value));
    };
    const int64_t least = least_columns(args);
    within("first_rows", tile.first_rows, 1, max_rows, 1);
    within("last_rows", tile.last_rows, tile.first_rows, INT64_MAX, 1);
    within("row_tile", tile.shape.row_tile, 1, kMaxRowTile, 1);
    within("column_tile", tile.shape.column_tile, least, round_up(args.w.columns, least), least);
    within("regions", tile.shape.regions, 1, threads, 1);
    const int64_t row_tiles = ceil_div(std::min(tile.last_rows, max_rows), tile.shape.row_tile);
    if (row_tiles * ceil_div(args.w.columns, tile.shape.column_tile) >> ThreadPool::kTileBits)
        throw std::invalid_argument("a row_tile of " + std::to_string(tile.shape.row_tile) + " makes more tiles than can be counted");
    for (const TunedTile& other : others)
        if (tile.first_rows <= other.last_rows && other.first_rows <= tile.last_rows)
            throw std::invalid_argument("two tiles for " + std::to_string(std::max(tile.first_rows, other.first_rows)) + " rows");
}

int64_t cut_linear(LinearArgs& args, int64_t rows, const std::vector<TunedTile>& tuned, int threads) {
    TileShape shape;
    for (const TunedTile& tile : tuned)
        if (tile.first_rows <= rows && rows <= tile.last_rows) shape = tile.shape;
    if (shape.row_tile == 0) {
        shape = built_in(args, rows, threads);
    } else {
        const int64_t even = round_up(ceil_div(rows, ceil_div(rows, shape.row_tile)), kRowUnit);
        shape.row_tile = std::min({shape.row_tile, even, rows});
    }
    args.rows = rows;
    args.row_tile = (int)shape.row_tile;
    args.column_tile = (int)shape.column_tile;
    args.row_tiles = ceil_div(rows, shape.row_tile);
    args.column_tiles = ceil_div(args.w.columns, shape.column_tile);
    args.streams = std::min(shape.regions, args.column_tiles);
    return args.row_tiles * args.column_tiles;
}

}  // namespace octavo
