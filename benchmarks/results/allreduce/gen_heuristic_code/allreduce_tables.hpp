// SPDX-License-Identifier: Apache-2.0
// All-reduce tables by ranges of tokens and hidden sizes, written by `phalanx allreduce codegen`: tune again rather than edit.
// lookup() answers like phalanx.tables.Table.lookup in Python on every size; a test compiles this and compares.
// sm90.nvlink.tp2 sha256:4b92aa537034fb004151154a7fa5aa1987cb81136a2e657e85c764918a09d526
// sm90.nvlink.tp4 sha256:e2db0f4a6429f889b618c960b8ff5f03ee7445fea9d7c9fb2fb8fe3a083396db
#ifndef PHALANX_ALLREDUCE_TABLES_HPP
#define PHALANX_ALLREDUCE_TABLES_HPP

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>

namespace phalanx {
namespace allreduce {

enum Dtype { bf16, fp16, fp32 };
// strategy: TensorRT-LLM's number. fused: the fusion runs in the collective's own kernel. measured: false where the seed answers.
struct Answer { int strategy; bool fused; bool measured; };
struct Span { std::int64_t first, last; int strategy; bool fused; };
struct Row { std::int64_t first, last; const Span* spans; int count; };
struct Section { const Row* rows; int count; };
struct Model { int strategy; bool fused; std::uint64_t a, b, c; };
struct Seed { const Model* models; int count; };
struct Table {
    int sm; const char* link; int world; const char* digest;
    Section sections[3][8]; Seed seeds[8];
};

static constexpr Span k0_bf16_0_0[] = {{1, 8192, 4, false}};
static constexpr Span k0_bf16_0_1[] = {{1, 8831, 4, false}, {8832, 16384, 5, false}};
static constexpr Span k0_bf16_0_2[] = {{1, 4384, 4, false}, {4385, 16384, 5, false}};
static constexpr Span k0_bf16_0_3[] = {{1, 2157, 4, false}, {2158, 16384, 5, false}};
static constexpr Span k0_bf16_0_4[] = {{1, 1097, 4, false}, {1098, 16384, 5, false}};
static constexpr Span k0_bf16_0_5[] = {{1, 539, 4, false}, {540, 16384, 5, false}};
static constexpr Span k0_bf16_0_6[] = {{1, 269, 4, false}, {270, 16384, 5, false}};
static constexpr Row k0_bf16_0[] = {{128, 181, k0_bf16_0_0, 1}, {182, 362, k0_bf16_0_1, 2}, {363, 724, k0_bf16_0_2, 2}, {725, 1448, k0_bf16_0_3, 2}, {1449, 2896, k0_bf16_0_4, 2}, {2897, 5792, k0_bf16_0_5, 2}, {5793, 8192, k0_bf16_0_6, 2}};
static constexpr Span k0_bf16_1_0[] = {{1, 1, 4, false}, {2, 773, 4, true}, {774, 4201, 4, false}, {4202, 8192, 4, true}};
static constexpr Span k0_bf16_1_1[] = {{1, 9127, 4, true}, {9128, 16384, 5, false}};
static constexpr Span k0_bf16_1_2[] = {{1, 5730, 4, true}, {5731, 16384, 5, false}};
static constexpr Span k0_bf16_1_3[] = {{1, 5482, 4, true}, {5483, 16384, 5, false}};
static constexpr Span k0_bf16_1_4[] = {{1, 2083, 4, true}, {2084, 15333, 5, true}, {15334, 16384, 5, false}};
static constexpr Span k0_bf16_1_5[] = {{1, 56, 4, true}, {57, 493, 5, true}, {494, 2634, 4, true}, {2635, 16384, 5, true}};
static constexpr Span k0_bf16_1_6[] = {{1, 13, 4, true}, {14, 28, 4, false}, {29, 365, 5, true}, {366, 16384, 4, true}};
static constexpr Row k0_bf16_1[] = {{128, 181, k0_bf16_1_0, 4}, {182, 362, k0_bf16_1_1, 2}, {363, 724, k0_bf16_1_2, 2}, {725, 1448, k0_bf16_1_3, 2}, {1449, 2896, k0_bf16_1_4, 3}, {2897, 5792, k0_bf16_1_5, 4}, {5793, 8192, k0_bf16_1_6, 4}};
static constexpr Span k0_bf16_4_0[] = {{1, 1021, 4, true}, {1022, 5114, 4, false}, {5115, 8192, 4, true}};
static constexpr Span k0_bf16_4_1[] = {{1, 8192, 4, true}, {8193, 16384, 5, false}};
static constexpr Span k0_bf16_4_2[] = {{1, 6187, 4, true}, {6188, 16384, 5, false}};
static constexpr Span k0_bf16_4_3[] = {{1, 228, 4, true}, {229, 279, 5, true}, {280, 1582, 4, true}, {1583, 4463, 4, false}, {4464, 16384, 5, false}};
static constexpr Span k0_bf16_4_4[] = {{1, 3300, 4, true}, {3301, 9824, 5, true}, {9825, 16384, 5, false}};
static constexpr Span k0_bf16_4_5[] = {{1, 90, 4, true}, {91, 243, 5, true}, {244, 3222, 4, true}, {3223, 16384, 5, true}};
static constexpr Span k0_bf16_4_6[] = {{1, 14, 4, true}, {15, 364, 5, true}, {365, 16384, 4, true}};
static constexpr Row k0_bf16_4[] = {{128, 181, k0_bf16_4_0, 3}, {182, 362, k0_bf16_4_1, 2}, {363, 724, k0_bf16_4_2, 2}, {725, 1448, k0_bf16_4_3, 5}, {1449, 2896, k0_bf16_4_4, 3}, {2897, 5792, k0_bf16_4_5, 4}, {5793, 8192, k0_bf16_4_6, 3}};
static constexpr Span k0_bf16_5_0[] = {{1, 5792, 4, false}, {5793, 8192, 4, true}};
static constexpr Span k0_bf16_5_1[] = {{1, 1471, 4, true}, {1472, 8066, 4, false}, {8067, 16384, 5, false}};
static constexpr Span k0_bf16_5_2[] = {{1, 2896, 4, true}, {2897, 8801, 4, false}, {8802, 16384, 5, false}};
static constexpr Span k0_bf16_5_3[] = {{1, 219, 4, true}, {220, 295, 5, true}, {296, 749, 4, true}, {750, 1463, 5, true}, {1464, 4751, 4, false}, {4752, 16384, 5, false}};
static constexpr Span k0_bf16_5_4[] = {{1, 104, 4, true}, {105, 606, 5, true}, {607, 2639, 4, true}, {2640, 16384, 5, false}};
static constexpr Span k0_bf16_5_5[] = {{1, 49, 4, true}, {50, 394, 5, true}, {395, 7358, 4, true}, {7359, 16384, 5, false}};
static constexpr Span k0_bf16_5_6[] = {{1, 21, 4, false}, {22, 384, 5, true}, {385, 16384, 4, true}};
static constexpr Row k0_bf16_5[] = {{128, 181, k0_bf16_5_0, 2}, {182, 362, k0_bf16_5_1, 3}, {363, 724, k0_bf16_5_2, 3}, {725, 1448, k0_bf16_5_3, 6}, {1449, 2896, k0_bf16_5_4, 4}, {2897, 5792, k0_bf16_5_5, 4}, {5793, 8192, k0_bf16_5_6, 3}};
static constexpr Model k0_seed_0[] = {{0, false, 22275857143ULL, 3968ULL, 1062502ULL}, {4, false, 1683624633ULL, 2976ULL, 0ULL}, {5, false, 2665791891ULL, 2833ULL, 0ULL}};
static constexpr Model k0_seed_1[] = {{0, false, 11856483871ULL, 4740ULL, 1431340ULL}, {4, true, 2436826772ULL, 3404ULL, 509068ULL}, {5, true, 3169304293ULL, 3094ULL, 1752732ULL}, {4, false, 2573806452ULL, 4118ULL, 230094ULL}, {5, false, 3621291085ULL, 3829ULL, 256038ULL}};
static constexpr Model k0_seed_4[] = {{0, false, 12052974603ULL, 4675ULL, 1369668ULL}, {4, true, 2609629921ULL, 3316ULL, 568892ULL}, {5, true, 3291828257ULL, 3096ULL, 1936234ULL}, {4, false, 2790466667ULL, 4019ULL, 240854ULL}, {5, false, 3834868441ULL, 3713ULL, 285817ULL}};
static constexpr Model k0_seed_5[] = {{0, false, 12417870968ULL, 5274ULL, 1166597ULL}, {4, true, 2898795276ULL, 3922ULL, 885756ULL}, {5, true, 3569650943ULL, 3507ULL, 2777998ULL}, {4, false, 3031367082ULL, 4520ULL, 80350ULL}, {5, false, 4040669291ULL, 4216ULL, 101689ULL}};
static constexpr Model k0_seed_6[] = {{0, false, 9400000000ULL, 4300ULL, 0ULL}, {4, true, 4500000000ULL, 3500ULL, 0ULL}, {5, true, 7000000000ULL, 3800ULL, 0ULL}, {4, false, 5200000000ULL, 4000ULL, 0ULL}, {5, false, 7700000000ULL, 4300ULL, 0ULL}};
static constexpr Model k0_seed_7[] = {{0, false, 9400000000ULL, 4300ULL, 0ULL}, {4, true, 4500000000ULL, 3500ULL, 0ULL}, {5, true, 7000000000ULL, 3800ULL, 0ULL}, {4, false, 5200000000ULL, 4000ULL, 0ULL}, {5, false, 7700000000ULL, 4300ULL, 0ULL}};
static constexpr Model k0_seed_68[] = {{0, false, 9400000000ULL, 4300ULL, 0ULL}, {4, true, 4500000000ULL, 3500ULL, 0ULL}, {5, true, 7000000000ULL, 3800ULL, 0ULL}, {4, false, 5200000000ULL, 4000ULL, 0ULL}, {5, false, 7700000000ULL, 4300ULL, 0ULL}};
static constexpr Model k0_seed_70[] = {{0, false, 9400000000ULL, 4300ULL, 0ULL}, {4, true, 4500000000ULL, 3500ULL, 0ULL}, {5, true, 7000000000ULL, 3800ULL, 0ULL}, {4, false, 5200000000ULL, 4000ULL, 0ULL}, {5, false, 7700000000ULL, 4300ULL, 0ULL}};
static constexpr Span k1_bf16_0_0[] = {{1, 64, 4, false}};
static constexpr Span k1_bf16_0_1[] = {{1, 115, 4, false}, {116, 16384, 5, false}};
static constexpr Span k1_bf16_0_2[] = {{1, 57, 4, false}, {58, 16384, 5, false}};
static constexpr Span k1_bf16_0_3[] = {{1, 28, 4, false}, {29, 16384, 5, false}};
static constexpr Span k1_bf16_0_4[] = {{1, 14, 4, false}, {15, 11585, 5, false}, {11586, 16384, 0, false}};
static constexpr Row k1_bf16_0[] = {{512, 724, k1_bf16_0_0, 1}, {725, 1448, k1_bf16_0_1, 2}, {1449, 2896, k1_bf16_0_2, 2}, {2897, 5792, k1_bf16_0_3, 2}, {5793, 8192, k1_bf16_0_4, 3}};
static constexpr Span k1_bf16_1_0[] = {{1, 32, 4, true}};
static constexpr Span k1_bf16_1_1[] = {{1, 73, 4, true}, {74, 991, 5, true}, {992, 1130, 5, false}, {1131, 9139, 5, true}, {9140, 16384, 5, false}};
static constexpr Span k1_bf16_1_2[] = {{1, 37, 4, false}, {38, 16384, 5, true}};
static constexpr Span k1_bf16_1_3[] = {{1, 27, 4, false}, {28, 16384, 5, true}};
static constexpr Span k1_bf16_1_4[] = {{1, 13, 4, false}, {14, 16384, 5, true}};
static constexpr Row k1_bf16_1[] = {{512, 724, k1_bf16_1_0, 1}, {725, 1448, k1_bf16_1_1, 5}, {1449, 2896, k1_bf16_1_2, 2}, {2897, 5792, k1_bf16_1_3, 2}, {5793, 8192, k1_bf16_1_4, 2}};
static constexpr Span k1_bf16_4_0[] = {{1, 32, 4, true}};
static constexpr Span k1_bf16_4_1[] = {{1, 74, 4, true}, {75, 2841, 5, true}, {2842, 16384, 5, false}};
static constexpr Span k1_bf16_4_2[] = {{1, 38, 4, false}, {39, 16384, 5, true}};
static constexpr Span k1_bf16_4_3[] = {{1, 28, 4, false}, {29, 16384, 5, true}};
static constexpr Span k1_bf16_4_4[] = {{1, 12, 4, false}, {13, 16384, 5, true}};
static constexpr Row k1_bf16_4[] = {{512, 724, k1_bf16_4_0, 1}, {725, 1448, k1_bf16_4_1, 3}, {1449, 2896, k1_bf16_4_2, 2}, {2897, 5792, k1_bf16_4_3, 2}, {5793, 8192, k1_bf16_4_4, 2}};
static constexpr Span k1_bf16_5_0[] = {{1, 32, 4, true}};
static constexpr Span k1_bf16_5_1[] = {{1, 77, 4, true}, {78, 665, 5, true}, {666, 1719, 5, false}, {1720, 2441, 5, true}, {2442, 16384, 5, false}};
static constexpr Span k1_bf16_5_2[] = {{1, 32, 4, false}, {33, 6427, 5, true}, {6428, 16384, 5, false}};
static constexpr Span k1_bf16_5_3[] = {{1, 27, 4, false}, {28, 16384, 5, true}};
static constexpr Span k1_bf16_5_4[] = {{1, 21, 4, true}, {22, 16384, 5, true}};
static constexpr Row k1_bf16_5[] = {{512, 724, k1_bf16_5_0, 1}, {725, 1448, k1_bf16_5_1, 5}, {1449, 2896, k1_bf16_5_2, 3}, {2897, 5792, k1_bf16_5_3, 2}, {5793, 8192, k1_bf16_5_4, 2}};
static constexpr Model k1_seed_0[] = {{0, false, 26518392962ULL, 5207ULL, 0ULL}, {4, false, 1772793651ULL, 8978ULL, 0ULL}, {5, false, 3223815041ULL, 4440ULL, 0ULL}};
static constexpr Model k1_seed_1[] = {{0, false, 15874572870ULL, 5719ULL, 2540896ULL}, {4, true, 2662121331ULL, 8635ULL, 2786117ULL}, {5, true, 3640650794ULL, 4832ULL, 904984ULL}, {4, false, 2759845552ULL, 10446ULL, 0ULL}, {5, false, 4381428571ULL, 5480ULL, 0ULL}};
static constexpr Model k1_seed_4[] = {{0, false, 16000541176ULL, 5673ULL, 2102777ULL}, {4, true, 2839320939ULL, 8631ULL, 2742718ULL}, {5, true, 3789097507ULL, 4805ULL, 1134009ULL}, {4, false, 2968095797ULL, 10364ULL, 0ULL}, {5, false, 4568431937ULL, 5440ULL, 0ULL}};
static constexpr Model k1_seed_5[] = {{0, false, 16490166448ULL, 6422ULL, 904921ULL}, {4, true, 3217884615ULL, 8789ULL, 4493352ULL}, {5, true, 4063698039ULL, 5506ULL, 637285ULL}, {4, false, 3261857143ULL, 10687ULL, 0ULL}, {5, false, 4792260774ULL, 5966ULL, 0ULL}};
static constexpr Model k1_seed_6[] = {{0, false, 13200000000ULL, 5950ULL, 0ULL}, {4, true, 5140000000ULL, 9500ULL, 0ULL}, {5, true, 8200000000ULL, 5450ULL, 0ULL}, {4, false, 5840000000ULL, 10000ULL, 0ULL}, {5, false, 8900000000ULL, 5950ULL, 0ULL}};
static constexpr Model k1_seed_7[] = {{0, false, 13200000000ULL, 5950ULL, 0ULL}, {4, true, 5140000000ULL, 9500ULL, 0ULL}, {5, true, 8200000000ULL, 5450ULL, 0ULL}, {4, false, 5840000000ULL, 10000ULL, 0ULL}, {5, false, 8900000000ULL, 5950ULL, 0ULL}};
static constexpr Model k1_seed_68[] = {{0, false, 13200000000ULL, 5950ULL, 0ULL}, {4, true, 5140000000ULL, 9500ULL, 0ULL}, {5, true, 8200000000ULL, 5450ULL, 0ULL}, {4, false, 5840000000ULL, 10000ULL, 0ULL}, {5, false, 8900000000ULL, 5950ULL, 0ULL}};
static constexpr Model k1_seed_70[] = {{0, false, 13200000000ULL, 5950ULL, 0ULL}, {4, true, 5140000000ULL, 9500ULL, 0ULL}, {5, true, 8200000000ULL, 5450ULL, 0ULL}, {4, false, 5840000000ULL, 10000ULL, 0ULL}, {5, false, 8900000000ULL, 5950ULL, 0ULL}};
static constexpr Table kTables[] = {
    {90, "nvlink", 2, "4b92aa537034fb004151154a7fa5aa1987cb81136a2e657e85c764918a09d526",
     {{{k0_bf16_0, 7}, {k0_bf16_1, 7}, {k0_bf16_4, 7}, {k0_bf16_5, 7}, {k0_bf16_4, 7}, {k0_bf16_5, 7}, {k0_bf16_4, 7}, {k0_bf16_4, 7}}, {{k0_bf16_0, 7}, {k0_bf16_1, 7}, {k0_bf16_4, 7}, {k0_bf16_5, 7}, {k0_bf16_4, 7}, {k0_bf16_5, 7}, {k0_bf16_4, 7}, {k0_bf16_4, 7}}, {{nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}}},
     {{k0_seed_0, 3}, {k0_seed_1, 5}, {k0_seed_4, 5}, {k0_seed_5, 5}, {k0_seed_6, 5}, {k0_seed_7, 5}, {k0_seed_68, 5}, {k0_seed_70, 5}}},
    {90, "nvlink", 4, "e2db0f4a6429f889b618c960b8ff5f03ee7445fea9d7c9fb2fb8fe3a083396db",
     {{{k1_bf16_0, 5}, {k1_bf16_1, 5}, {k1_bf16_4, 5}, {k1_bf16_5, 5}, {k1_bf16_4, 5}, {k1_bf16_5, 5}, {k1_bf16_4, 5}, {k1_bf16_4, 5}}, {{k1_bf16_0, 5}, {k1_bf16_1, 5}, {k1_bf16_4, 5}, {k1_bf16_5, 5}, {k1_bf16_4, 5}, {k1_bf16_5, 5}, {k1_bf16_4, 5}, {k1_bf16_4, 5}}, {{nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}}},
     {{k1_seed_0, 3}, {k1_seed_1, 5}, {k1_seed_4, 5}, {k1_seed_5, 5}, {k1_seed_6, 5}, {k1_seed_7, 5}, {k1_seed_68, 5}, {k1_seed_70, 5}}},
};
// The table of a machine (its link class as Python names it, for example "nvlink"), or nullptr.
inline const Table* find(int sm, const char* link, int world) {
    for (const Table& table : kTables)
        if (table.sm == sm && table.world == world && std::strcmp(table.link, link) == 0) return &table;
    return nullptr;
}

// A fusion's place in the tables, by its number. Throws for a number that is none.
inline int fusion_place(int fusion) {
    switch (fusion) {
        case 0: return 0;  // NONE
        case 1: return 1;  // RESIDUAL_RMS_NORM
        case 4: return 2;  // RESIDUAL_RMS_NORM_QUANT_FP8
        case 5: return 3;  // RESIDUAL_RMS_NORM_QUANT_NVFP4
        case 6: return 4;  // RESIDUAL_RMS_NORM_OUT_QUANT_FP8
        case 7: return 5;  // RESIDUAL_RMS_NORM_OUT_QUANT_NVFP4
        case 68: return 6;  // RESIDUAL_RMS_NORM_QUANT_FP8_TOKEN_SCALE
        case 70: return 7;  // RESIDUAL_RMS_NORM_OUT_QUANT_FP8_TOKEN_SCALE
    }
    throw std::invalid_argument("unknown fusion");
}

template <typename Range>
const Range* holding(const Range* ranges, int count, std::int64_t value) {
    const auto before = [](std::int64_t v, const Range& range) { return v < range.first; };
    const Range* after = std::upper_bound(ranges, ranges + count, value, before);
    return after == ranges || value > (after - 1)->last ? nullptr : after - 1;
}

// What to run for a tensor [tokens, hidden] of `dtype` per rank. Throws unless tokens and hidden are at least 1.
inline Answer lookup(const Table& table, Dtype dtype, int fusion, std::int64_t tokens, std::int64_t hidden) {
    if (tokens < 1 || hidden < 1) throw std::invalid_argument("no message has fewer than 1 token or hidden size");
    const int place = fusion_place(fusion);
    const Section& section = table.sections[dtype][place];
    if (const Row* row = holding(section.rows, section.count, hidden))
        if (const Span* span = holding(row->spans, row->count, tokens)) return {span->strategy, span->fused, true};
    constexpr std::int64_t kMaxBytes = 274877906944LL, kMaxTokens = 268435456LL;
    constexpr std::int64_t kItem[] = {2, 2, 4};
    const std::int64_t t = std::min(tokens, kMaxBytes), h = std::min(hidden, kMaxBytes);
    const std::int64_t bytes = h > kMaxBytes / t ? kMaxBytes : std::min(t * h * kItem[dtype], kMaxBytes);
    const Seed& seed = table.seeds[place];
    const Model* best = nullptr;
    std::uint64_t least = 0;
    for (const Model* model = seed.models; model != seed.models + seed.count; ++model) {
        const std::uint64_t time = model->a + model->b * static_cast<std::uint64_t>(bytes)
            + model->c * static_cast<std::uint64_t>(std::min(tokens, kMaxTokens));
        if (!best || time < least) { best = model; least = time; }
    }
    return {best->strategy, best->fused, false};
}

}  // namespace allreduce
}  // namespace phalanx

#endif  // PHALANX_ALLREDUCE_TABLES_HPP
