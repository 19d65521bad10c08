// Splitting the attention of a step: tiles of rows, spans where sequences are few, and prefixes that sequences have in common.
#include "attention_work.h"

#include <algorithm>
#include <cstring>

namespace octavo {

namespace {

constexpr int kChunkBlocks = kChunk / kBlock;

// Leading chunks that two tables have in the same blocks, of `most`.
int32_t common_chunks(const int32_t* a, const int32_t* b, int32_t most) {
    int32_t chunks = 0;
    while (chunks < most && std::memcmp(a + chunks * kChunkBlocks, b + chunks * kChunkBlocks, kChunkBlocks * sizeof(int32_t)) == 0) ++chunks;
    return chunks;
}

}  // namespace

int64_t AttentionWork::own_tokens(const AttentionItem& item, const AttentionPiece& piece) {
    const int64_t begin = std::max<int64_t>(piece.span_begin * kSpan, shared_tokens(item));
    return std::max<int64_t>(0, std::min<int64_t>(piece.last + 1, piece.span_end * kSpan) - begin);
}

// Sorts the pieces of joined_ by the blocks of their tables and finds those that follow each other with leading chunks in common. A
// run takes in a piece that has fewer of them when more reads are saved with it, though of fewer chunks.
void AttentionWork::find_runs(const AttentionStep& step) {
    runs_.clear();
    auto table = [&](const AttentionPiece& p) { return step.tables + p.sequence * step.stride; };
    // Chunks wholly behind the piece's rows: none of it is written in this step.
    auto whole = [&](const AttentionPiece& p) { return step.starts[p.sequence] / kChunk; };
    std::sort(joined_.begin(), joined_.end(), [&](const AttentionPiece& a, const AttentionPiece& b) {
        const int32_t least = std::min(whole(a), whole(b));
        const int order = std::memcmp(table(a), table(b), (size_t)least * kChunkBlocks * sizeof(int32_t));
        if (order != 0) return order < 0;
        return whole(a) != whole(b) ? whole(a) < whole(b) : a.sequence < b.sequence;
    });
    for (size_t i = 0; i < joined_.size();) {
        Run run{i, i + 1, whole(joined_[i])};
        for (; run.end < joined_.size(); ++run.end) {
            const int32_t common = common_chunks(table(joined_[i]), table(joined_[run.end]), std::min(run.chunks, whole(joined_[run.end])));
            const int64_t saved = (int64_t)(run.end - run.begin - 1) * run.chunks;
            if (common == 0 || (int64_t)(run.end - run.begin) * common < saved) break;
            run.chunks = common;
        }
        if (run.end - run.begin == 1) run.chunks = 0;
        runs_.push_back(run);
        i = run.end;
    }
}

// The item, of the pieces added last, once or for each kv head.
void AttentionWork::add(const AttentionItem& item, bool split_heads) {
    for (int h = 0; h < kv_heads_; h += split_heads ? 1 : kv_heads_) {
        items_.push_back(item);
        items_.back().head_begin = h;
        items_.back().head_end = split_heads ? h + 1 : kv_heads_;
        first_piece_.push_back(pieces_.size() - (size_t)item.pieces);
    }
}

void AttentionWork::build(const AttentionStep& step, int64_t partial_slots) {
    items_.clear();
    merges_.clear();
    pieces_.clear();
    first_piece_.clear();
    joined_.clear();
    const int group = q_heads_ / kv_heads_;
    const int tile = std::max(1, kAttentionRows / group);
    const int64_t wanted = 4 * step.threads;
    int64_t tiles = 0;
    for (int64_t s = 0; s < step.sequences; ++s) tiles += ceil_div(step.counts[s], tile);
    const bool split_heads = tiles < wanted;
    const bool split_spans = tiles * kv_heads_ < wanted;
    int64_t slots = 0, joined_cost = 0;
    int32_t first_token = 0;
    for (int64_t s = 0; s < step.sequences; ++s) {
        const int32_t count = step.counts[s], start = step.starts[s];
        for (int32_t t = 0; t < count; t += tile) {
            AttentionPiece piece;
            piece.sequence = (int32_t)s;
            piece.token_begin = first_token + t;
            piece.token_end = first_token + std::min(t + tile, count);
            const int32_t oldest = start + t, last = start + (bidirectional_ ? count : std::min(t + tile, count)) - 1;
            piece.span_begin = first_seen(window_, chunked_, oldest) / kSpan;
            piece.span_end = last / kSpan + 1;
            piece.last = last;
            const int32_t begin = piece.span_begin, spans = piece.span_end - begin, rows = piece.token_end - piece.token_begin;
            // A window that has not been reached yet hides nothing.
            if (!split_spans && count * group <= kAttentionRows / 2 && (window_ == 0 || last < window_)) {
                joined_.push_back(piece);
                joined_cost += (int64_t)(last + 1) * rows;
                continue;
            }
            AttentionItem item;
            item.pieces = 1;
            item.first_span = begin;
            const int64_t needed = (int64_t)spans * rows * q_heads_;
            const bool by_span = split_spans && spans > 1 && slots + needed <= partial_slots;
            if (by_span) {
                item.partial = (int32_t)slots;
                for (int32_t r = 0; r < rows; ++r) merges_.push_back({piece.token_begin + r, (int32_t)slots + r * q_heads_, spans, rows});
                slots += needed;
            }
            for (int32_t span = begin; span < begin + spans; span += by_span ? 1 : spans) {
                pieces_.push_back(piece);
                if (by_span) pieces_.back().span_begin = span, pieces_.back().span_end = span + 1;
                add(item, split_heads);
            }
        }
        first_token += count;
    }
    find_runs(step);
    // Items enough for all threads: of 64 sequences, 8 to an item were as fast as 16, 4 took 4 % longer, 2 took 9 %.
    size_t alone = 0;
    for (const Run& run : runs_) {
        if (run.chunks == 0) {
            joined_[alone++] = joined_[run.begin];
            continue;
        }
        const int64_t count = (int64_t)(run.end - run.begin);
        int64_t rows = 0;
        for (size_t i = run.begin; i < run.end; ++i) rows = std::max<int64_t>(rows, (joined_[i].token_end - joined_[i].token_begin) * group);
        const int64_t balanced = split_heads ? ceil_div(2 * step.threads, kv_heads_) : wanted;
        const int64_t parts = std::max(ceil_div(count, kAttentionRows / rows), std::min(count / 2, ceil_div(balanced * count, tiles)));
        for (int64_t p = 0; p < parts; ++p) {
            AttentionItem item;
            item.shared_chunks = run.chunks;
            for (int64_t i = count * p / parts; i < count * (p + 1) / parts; ++i, ++item.pieces) pieces_.push_back(joined_[run.begin + (size_t)i]);
            add(item, split_heads);
        }
    }
    joined_.resize(alone);
    // Several of the others follow each other in an item, as the first chunk of each but the first is then asked for in time: 64
    // decodes at position 60 took 2.4 ms instead of 4.1, at 256 11.9 instead of 12.4.
    std::sort(joined_.begin(), joined_.end(), [&](const AttentionPiece& a, const AttentionPiece& b) {
        return a.last != b.last ? a.last > b.last : a.sequence < b.sequence;
    });
    auto alone_cost = [](const AttentionPiece& p) { return (int64_t)(p.last + 1) * (p.token_end - p.token_begin); };
    const int64_t most = split_heads ? 0 : joined_cost / wanted;
    for (size_t i = 0; i < joined_.size();) {
        AttentionItem item;
        int64_t cost = 0;
        do {
            cost += alone_cost(joined_[i]);
            pieces_.push_back(joined_[i++]);
            ++item.pieces;
        } while (i < joined_.size() && cost + alone_cost(joined_[i]) <= most);
        add(item, split_heads);
    }
    for (size_t i = 0; i < items_.size(); ++i) items_[i].piece = pieces_.data() + first_piece_[i];
    // Longest first, so that the last tile to be claimed is short.
    auto cost = [](const AttentionItem& item) {
        int64_t sum = 0;
        for (int p = 0; p < item.pieces; ++p) {
            const AttentionPiece& piece = item.piece[p];
            sum += (own_tokens(item, piece) + shared_tokens(item) / 2) * (piece.token_end - piece.token_begin);
        }
        return sum;
    };
    std::stable_sort(items_.begin(), items_.end(), [&](const AttentionItem& a, const AttentionItem& b) { return cost(a) > cost(b); });
}

}  // namespace octavo
