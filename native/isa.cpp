// Which instruction-set levels are compiled in and which of them this processor can run.
#include <stdexcept>

#include "kernel_table.h"
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace octavo {
namespace portable { extern const KernelTable table; }
#ifdef OCTAVO_HAS_v3
namespace v3 { extern const KernelTable table; }
#endif
#ifdef OCTAVO_HAS_v4
namespace v4 { extern const KernelTable table; }
#endif
#ifdef OCTAVO_HAS_dotprod
namespace dotprod { extern const KernelTable table; }
#endif

namespace {

#if defined(__x86_64__) && defined(OCTAVO_HAS_v3)
// Not every compiler's __builtin_cpu_supports knows this one.
bool has_f16c() {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

std::vector<const KernelTable*> runnable() {
    std::vector<const KernelTable*> tables{&portable::table};
#if defined(__x86_64__)
    __builtin_cpu_init();
#ifdef OCTAVO_HAS_v3
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") && has_f16c())
        tables.push_back(&v3::table);
#endif
#ifdef OCTAVO_HAS_v4
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd") &&
        __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16"))
        tables.push_back(&v4::table);
#endif
#endif
#if defined(__aarch64__) && defined(__linux__) && defined(OCTAVO_HAS_dotprod)
    constexpr unsigned long kHwcapAsimdDp = 1UL << 20;
    if (getauxval(AT_HWCAP) & kHwcapAsimdDp) tables.push_back(&dotprod::table);
#endif
    return tables;
}

}  // namespace

std::vector<std::string> available_levels() {
    std::vector<std::string> names;
    for (const KernelTable* t : runnable()) names.emplace_back(t->name);
    return names;
}

const KernelTable& kernel_table(const std::string& name) {
    auto tables = runnable();
    if (name.empty()) return *tables.back();
    std::string known;
    for (const KernelTable* t : tables) {
        if (name == t->name) return *t;
        known += (known.empty() ? "" : ", ") + std::string(t->name);
    }
    throw std::invalid_argument("OCTAVO_ISA=" + name + " is not an instruction-set level of this build and machine; use one of: " + known);
}

}  // namespace octavo
