// What tuning asks of a plan: its linears, the tiles they are cut into, and other tiles for them.
#include <stdexcept>

#include "plan.h"

namespace octavo {

std::vector<Plan::LinearReport> Plan::linears() const {
    std::vector<LinearReport> found;
    for (const auto* list : {&body_, &head_})
        for (const auto& op : *list)
            if (op.kind == Kind::Linear)
                found.push_back({op.name, op.linear, list == &head_ ? limits_.head_rows : limits_.max_tokens, op.seconds});
    return found;
}

std::pair<Plan::Operation*, int64_t> Plan::linear(int64_t index) {
    int64_t next = 0;
    for (auto* list : {&body_, &head_})
        for (auto& op : *list)
            if (op.kind == Kind::Linear && next++ == index) return {&op, list == &head_ ? limits_.head_rows : limits_.max_tokens};
    throw std::invalid_argument("linear " + std::to_string(index) + " of a plan that has " + std::to_string(next));
}

void Plan::set_tile(int64_t index, const TunedTile& tile) {
    const auto [op, max_rows] = linear(index);
    check_tile(op->linear, tile, op->tuned, max_rows, threads());
    op->tuned.push_back(tile);
}

void Plan::clear_tiles() {
    for (auto* list : {&body_, &head_})
        for (auto& op : *list) op.tuned.clear();
}

TileShape Plan::tile_of(int64_t index, int64_t rows) {
    const auto [op, max_rows] = linear(index);
    if (rows < 1 || rows > max_rows)
        throw std::invalid_argument("rows of linear " + std::to_string(index) + " must be 1 to " + std::to_string(max_rows) + ", got " + std::to_string(rows));
    LinearArgs args = op->linear;
    cut_linear(args, rows, op->tuned, threads());
    return {args.row_tile, args.column_tile, args.streams};
}

}  // namespace octavo
