// The green list of a watermark (Kirchenbauer et al. 2023): the tokens to prefer after a given token. It is the beginning of a
// random permutation of the vocabulary, the very one that Text Generation Inference draws on a CPU:
// torch.randperm(vocab, generator=torch.Generator("cpu").manual_seed(15485863 * previous))[:count].
#pragma once
#include <cstdint>
#include <memory>

namespace octavo {

class GreenList {
public:
    explicit GreenList(int64_t vocab);

    // The first `count` (0 to vocab) tokens of the permutation for `previous`, valid until the next call. Allocates nothing.
    const int32_t* select(int64_t previous, int64_t count) noexcept;

    // Vocabularies from here on are permuted in another way by torch.
    static constexpr int64_t kVocabEnd = 0xffffffffll / 20;

private:
    static constexpr int kState = 624;
    void seed(uint32_t seed) noexcept;
    void refill() noexcept;

    int64_t vocab_;
    std::unique_ptr<int32_t[]> order_;
    uint32_t state_[kState], numbers_[kState];
};

}  // namespace octavo
