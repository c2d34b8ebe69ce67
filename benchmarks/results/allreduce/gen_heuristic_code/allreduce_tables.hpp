// SPDX-License-Identifier: Apache-2.0
// All-reduce tables by ranges of tokens and hidden sizes, written by `phalanx allreduce codegen`: tune again rather than edit.
// lookup() answers like phalanx.tables.Table.lookup in Python on every size; a test compiles this and compares.
// sm90.nvlink.tp2 sha256:b956c70e26b011698fa83b18e3853b51f3baf11da616e54f570c2327906e630d
// sm90.nvlink.tp4 sha256:25dd9a2358f72a491f7d2f70817f36b963aad0ccd4462c79c5dc88231747dc68
#ifndef PHALANX_ALLREDUCE_TABLES_HPP
#define PHALANX_ALLREDUCE_TABLES_HPP

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>

namespace phalanx {
namespace allreduce {

enum Dtype { bf16, fp16, fp32 };
// What the caller allows: every rank gets the whole residual; the new residual may stay sharded over the ranks; and the sum is of a
// GEMM's output, which the GEMM can write straight to other ranks.
enum Caller { REPLICATED, SHARDED, GEMM };
// strategy: TensorRT-LLM's number, or 64 (RS_NORM_AG) or 65 (GEMM_RS).
// fused: the fusion runs in the collective's own kernel. measured: false where the seed answers.
struct Answer { int strategy; bool fused; bool measured; };
struct Span { std::int64_t first, last; int strategy; bool fused; };
struct Row { std::int64_t first, last; const Span* spans; int count; };
struct Section { const Row* rows; int count; };
struct Model { int strategy; bool fused; std::uint64_t a, b, c; };
struct Seed { const Model* models; int count; };
struct Table {
    int sm; const char* link; int world; const char* digest;
    std::int64_t rs_norm_ag_min_tokens, gemm_rs_min_bytes;  // of the seed; the largest number: never
    Section sections[3][3][8]; Seed seeds[8];
};

static constexpr Span k0_bf16_0_0[] = {{1, 16384, 4, false}};
static constexpr Span k0_bf16_0_1[] = {{1, 8831, 4, false}, {8832, 16384, 5, false}};
static constexpr Span k0_bf16_0_2[] = {{1, 4384, 4, false}, {4385, 16384, 5, false}};
static constexpr Span k0_bf16_0_3[] = {{1, 2157, 4, false}, {2158, 16384, 5, false}};
static constexpr Span k0_bf16_0_4[] = {{1, 1097, 4, false}, {1098, 16384, 5, false}};
static constexpr Span k0_bf16_0_5[] = {{1, 539, 4, false}, {540, 16384, 5, false}};
static constexpr Span k0_bf16_0_6[] = {{1, 269, 4, false}, {270, 16384, 5, false}};
static constexpr Row k0_bf16_0[] = {{128, 181, k0_bf16_0_0, 1}, {182, 362, k0_bf16_0_1, 2}, {363, 724, k0_bf16_0_2, 2}, {725, 1448, k0_bf16_0_3, 2}, {1449, 2896, k0_bf16_0_4, 2}, {2897, 5792, k0_bf16_0_5, 2}, {5793, 8192, k0_bf16_0_6, 2}};
static constexpr Span k0_bf16_1_0[] = {{1, 1, 4, false}, {2, 773, 4, true}, {774, 4201, 4, false}, {4202, 16384, 4, true}};
static constexpr Span k0_bf16_1_1[] = {{1, 9127, 4, true}, {9128, 16384, 5, false}};
static constexpr Span k0_bf16_1_2[] = {{1, 5730, 4, true}, {5731, 16384, 5, false}};
static constexpr Span k0_bf16_1_3[] = {{1, 5482, 4, true}, {5483, 16384, 5, false}};
static constexpr Span k0_bf16_1_4[] = {{1, 2083, 4, true}, {2084, 15333, 5, true}, {15334, 16384, 5, false}};
static constexpr Span k0_bf16_1_5[] = {{1, 56, 4, true}, {57, 493, 5, true}, {494, 2634, 4, true}, {2635, 16384, 5, true}};
static constexpr Span k0_bf16_1_6[] = {{1, 13, 4, true}, {14, 28, 4, false}, {29, 365, 5, true}, {366, 16384, 4, true}};
static constexpr Row k0_bf16_1[] = {{128, 181, k0_bf16_1_0, 4}, {182, 362, k0_bf16_1_1, 2}, {363, 724, k0_bf16_1_2, 2}, {725, 1448, k0_bf16_1_3, 2}, {1449, 2896, k0_bf16_1_4, 3}, {2897, 5792, k0_bf16_1_5, 4}, {5793, 8192, k0_bf16_1_6, 4}};
static constexpr Span k0_bf16_4_0[] = {{1, 1021, 4, true}, {1022, 5114, 4, false}, {5115, 11941, 4, true}, {11942, 16384, 4, false}};
static constexpr Span k0_bf16_4_1[] = {{1, 8192, 4, true}, {8193, 16384, 5, false}};
static constexpr Span k0_bf16_4_2[] = {{1, 6187, 4, true}, {6188, 16384, 5, false}};
static constexpr Span k0_bf16_4_3[] = {{1, 228, 4, true}, {229, 279, 5, true}, {280, 1582, 4, true}, {1583, 4463, 4, false}, {4464, 16384, 5, false}};
static constexpr Span k0_bf16_4_4[] = {{1, 3300, 4, true}, {3301, 9824, 5, true}, {9825, 16384, 5, false}};
static constexpr Span k0_bf16_4_5[] = {{1, 90, 4, true}, {91, 243, 5, true}, {244, 3222, 4, true}, {3223, 16384, 5, true}};
static constexpr Span k0_bf16_4_6[] = {{1, 14, 4, true}, {15, 364, 5, true}, {365, 16384, 4, true}};
static constexpr Row k0_bf16_4[] = {{128, 181, k0_bf16_4_0, 4}, {182, 362, k0_bf16_4_1, 2}, {363, 724, k0_bf16_4_2, 2}, {725, 1448, k0_bf16_4_3, 5}, {1449, 2896, k0_bf16_4_4, 3}, {2897, 5792, k0_bf16_4_5, 4}, {5793, 8192, k0_bf16_4_6, 3}};
static constexpr Span k0_bf16_5_0[] = {{1, 16384, 4, false}};
static constexpr Span k0_bf16_5_1[] = {{1, 1471, 4, true}, {1472, 11585, 4, false}, {11586, 16384, 5, false}};
static constexpr Span k0_bf16_5_2[] = {{1, 2896, 4, true}, {2897, 8801, 4, false}, {8802, 16384, 5, false}};
static constexpr Span k0_bf16_5_3[] = {{1, 219, 4, true}, {220, 295, 5, true}, {296, 749, 4, true}, {750, 1463, 5, true}, {1464, 4751, 4, false}, {4752, 16384, 5, false}};
static constexpr Span k0_bf16_5_4[] = {{1, 104, 4, true}, {105, 606, 5, true}, {607, 2639, 4, true}, {2640, 16384, 5, false}};
static constexpr Span k0_bf16_5_5[] = {{1, 49, 4, true}, {50, 394, 5, true}, {395, 7358, 4, true}, {7359, 16384, 5, false}};
static constexpr Span k0_bf16_5_6[] = {{1, 21, 4, false}, {22, 384, 5, true}, {385, 16384, 4, true}};
static constexpr Row k0_bf16_5[] = {{128, 181, k0_bf16_5_0, 1}, {182, 362, k0_bf16_5_1, 3}, {363, 724, k0_bf16_5_2, 3}, {725, 1448, k0_bf16_5_3, 6}, {1449, 2896, k0_bf16_5_4, 4}, {2897, 5792, k0_bf16_5_5, 4}, {5793, 8192, k0_bf16_5_6, 3}};
static constexpr Span k0_bf16_6_0[] = {{1, 1107, 4, true}, {1108, 6066, 4, false}, {6067, 11418, 4, true}, {11419, 16384, 5, false}};
static constexpr Span k0_bf16_6_1[] = {{1, 7053, 4, true}, {7054, 16384, 5, false}};
static constexpr Span k0_bf16_6_2[] = {{1, 5613, 4, true}, {5614, 16384, 5, false}};
static constexpr Span k0_bf16_6_3[] = {{1, 1592, 4, true}, {1593, 4848, 4, false}, {4849, 16384, 5, false}};
static constexpr Span k0_bf16_6_4[] = {{1, 3093, 4, true}, {3094, 10568, 5, true}, {10569, 16384, 4, true}};
static constexpr Span k0_bf16_6_5[] = {{1, 2, 4, true}, {3, 59, 4, false}, {60, 330, 5, true}, {331, 2564, 4, true}, {2565, 16384, 5, true}};
static constexpr Span k0_bf16_6_6[] = {{1, 11, 4, true}, {12, 19, 4, false}, {20, 341, 5, true}, {342, 16384, 4, true}};
static constexpr Row k0_bf16_6[] = {{128, 181, k0_bf16_6_0, 4}, {182, 362, k0_bf16_6_1, 2}, {363, 724, k0_bf16_6_2, 2}, {725, 1448, k0_bf16_6_3, 3}, {1449, 2896, k0_bf16_6_4, 3}, {2897, 5792, k0_bf16_6_5, 5}, {5793, 8192, k0_bf16_6_6, 4}};
static constexpr Span k0_bf16_7_0[] = {{1, 16384, 4, false}};
static constexpr Span k0_bf16_7_1[] = {{1, 1512, 4, true}, {1513, 9147, 4, false}, {9148, 16384, 5, false}};
static constexpr Span k0_bf16_7_2[] = {{1, 2896, 4, true}, {2897, 9442, 4, false}, {9443, 16384, 5, false}};
static constexpr Span k0_bf16_7_3[] = {{1, 221, 4, true}, {222, 291, 5, true}, {292, 747, 4, true}, {748, 1165, 5, true}, {1166, 4584, 4, false}, {4585, 16384, 5, false}};
static constexpr Span k0_bf16_7_4[] = {{1, 95, 4, true}, {96, 635, 5, true}, {636, 1510, 4, true}, {1511, 4279, 5, true}, {4280, 16384, 5, false}};
static constexpr Span k0_bf16_7_5[] = {{1, 41, 4, true}, {42, 392, 5, true}, {393, 3062, 4, true}, {3063, 16384, 5, true}};
static constexpr Span k0_bf16_7_6[] = {{1, 18, 4, false}, {19, 390, 5, true}, {391, 10528, 4, true}, {10529, 16384, 5, true}};
static constexpr Row k0_bf16_7[] = {{128, 181, k0_bf16_7_0, 1}, {182, 362, k0_bf16_7_1, 3}, {363, 724, k0_bf16_7_2, 3}, {725, 1448, k0_bf16_7_3, 6}, {1449, 2896, k0_bf16_7_4, 5}, {2897, 5792, k0_bf16_7_5, 4}, {5793, 8192, k0_bf16_7_6, 4}};
static constexpr Span k0_bf16_68_0[] = {{1, 759, 4, true}, {760, 16384, 4, false}};
static constexpr Span k0_bf16_68_1[] = {{1, 2683, 4, true}, {2684, 9161, 4, false}, {9162, 16384, 5, false}};
static constexpr Span k0_bf16_68_2[] = {{1, 3114, 4, true}, {3115, 16384, 5, false}};
static constexpr Span k0_bf16_68_3[] = {{1, 1158, 4, true}, {1159, 4629, 4, false}, {4630, 16384, 5, false}};
static constexpr Span k0_bf16_68_4[] = {{1, 3716, 4, true}, {3717, 16384, 5, false}};
static constexpr Span k0_bf16_68_5[] = {{1, 51, 4, true}, {52, 292, 5, true}, {293, 2400, 4, true}, {2401, 16384, 5, true}};
static constexpr Span k0_bf16_68_6[] = {{1, 14, 4, true}, {15, 19, 4, false}, {20, 373, 5, true}, {374, 16384, 4, true}};
static constexpr Row k0_bf16_68[] = {{128, 181, k0_bf16_68_0, 2}, {182, 362, k0_bf16_68_1, 3}, {363, 724, k0_bf16_68_2, 2}, {725, 1448, k0_bf16_68_3, 3}, {1449, 2896, k0_bf16_68_4, 2}, {2897, 5792, k0_bf16_68_5, 4}, {5793, 8192, k0_bf16_68_6, 4}};
static constexpr Span k0_bf16_70_0[] = {{1, 740, 4, true}, {741, 16384, 4, false}};
static constexpr Span k0_bf16_70_1[] = {{1, 2629, 4, true}, {2630, 11585, 4, false}, {11586, 16384, 5, false}};
static constexpr Span k0_bf16_70_2[] = {{1, 3154, 4, true}, {3155, 16384, 5, false}};
static constexpr Span k0_bf16_70_3[] = {{1, 1148, 4, true}, {1149, 4493, 4, false}, {4494, 16384, 5, false}};
static constexpr Span k0_bf16_70_4[] = {{1, 116, 4, true}, {117, 165, 5, true}, {166, 4556, 4, true}, {4557, 16384, 5, false}};
static constexpr Span k0_bf16_70_5[] = {{1, 51, 4, true}, {52, 296, 5, true}, {297, 3479, 4, true}, {3480, 16384, 5, true}};
static constexpr Span k0_bf16_70_6[] = {{1, 14, 4, true}, {15, 18, 4, false}, {19, 331, 5, true}, {332, 16384, 4, true}};
static constexpr Row k0_bf16_70[] = {{128, 181, k0_bf16_70_0, 2}, {182, 362, k0_bf16_70_1, 3}, {363, 724, k0_bf16_70_2, 2}, {725, 1448, k0_bf16_70_3, 3}, {1449, 2896, k0_bf16_70_4, 4}, {2897, 5792, k0_bf16_70_5, 4}, {5793, 8192, k0_bf16_70_6, 4}};
static constexpr Model k0_seed_0[] = {{0, false, 17696142857ULL, 4086ULL, 526758ULL}, {4, false, 1683625611ULL, 2975ULL, 0ULL}, {5, false, 2665791891ULL, 2833ULL, 0ULL}};
static constexpr Model k0_seed_1[] = {{0, false, 8193533150ULL, 4656ULL, 1486888ULL}, {4, true, 2436826772ULL, 3404ULL, 509068ULL}, {5, true, 3145000000ULL, 3095ULL, 1758474ULL}, {4, false, 2573806452ULL, 4118ULL, 230094ULL}, {5, false, 3621291085ULL, 3829ULL, 256038ULL}};
static constexpr Model k0_seed_4[] = {{0, false, 8406251799ULL, 4600ULL, 1487888ULL}, {4, true, 2593251328ULL, 3316ULL, 572890ULL}, {5, true, 3291657442ULL, 3092ULL, 1959789ULL}, {4, false, 2790466667ULL, 4019ULL, 240854ULL}, {5, false, 3834585484ULL, 3713ULL, 290307ULL}};
static constexpr Model k0_seed_5[] = {{0, false, 8721523128ULL, 5189ULL, 1308242ULL}, {4, true, 2895977778ULL, 3910ULL, 935872ULL}, {5, true, 3568247089ULL, 3470ULL, 2940492ULL}, {4, false, 3014314961ULL, 4502ULL, 158967ULL}, {5, false, 4031061570ULL, 4199ULL, 385416ULL}};
static constexpr Model k0_seed_6[] = {{0, false, 8376979445ULL, 4778ULL, 1444298ULL}, {4, true, 2622433071ULL, 3518ULL, 523425ULL}, {5, true, 3336374468ULL, 3185ULL, 1930319ULL}, {4, false, 2785933333ULL, 4209ULL, 196412ULL}, {5, false, 3820730159ULL, 3977ULL, 249023ULL}};
static constexpr Model k0_seed_7[] = {{0, false, 8741108871ULL, 5273ULL, 1267037ULL}, {4, true, 2892906161ULL, 3959ULL, 1080437ULL}, {5, true, 3579561190ULL, 3484ULL, 3079471ULL}, {4, false, 3041684309ULL, 4567ULL, 112703ULL}, {5, false, 4058035689ULL, 4160ULL, 306612ULL}};
static constexpr Model k0_seed_68[] = {{0, false, 8543479111ULL, 4733ULL, 1435887ULL}, {4, true, 2599580645ULL, 3427ULL, 760840ULL}, {5, true, 3377217955ULL, 3271ULL, 2382992ULL}, {4, false, 2799000000ULL, 4208ULL, 206624ULL}, {5, false, 3856822102ULL, 3754ULL, 180471ULL}};
static constexpr Model k0_seed_70[] = {{0, false, 8547405405ULL, 4904ULL, 1404765ULL}, {4, true, 2593661213ULL, 3569ULL, 719429ULL}, {5, true, 3368894997ULL, 3327ULL, 2475579ULL}, {4, false, 2787608696ULL, 4352ULL, 171365ULL}, {5, false, 3844957250ULL, 3988ULL, 46424ULL}};
static constexpr Span k1_bf16_0_0[] = {{1, 919, 4, false}, {920, 16384, 5, false}};
static constexpr Span k1_bf16_0_1[] = {{1, 458, 4, false}, {459, 16384, 5, false}};
static constexpr Span k1_bf16_0_2[] = {{1, 229, 4, false}, {230, 16384, 5, false}};
static constexpr Span k1_bf16_0_3[] = {{1, 115, 4, false}, {116, 16384, 5, false}};
static constexpr Span k1_bf16_0_4[] = {{1, 57, 4, false}, {58, 16384, 5, false}};
static constexpr Span k1_bf16_0_5[] = {{1, 28, 4, false}, {29, 16384, 5, false}};
static constexpr Span k1_bf16_0_6[] = {{1, 14, 4, false}, {15, 11585, 5, false}, {11586, 16384, 0, false}};
static constexpr Row k1_bf16_0[] = {{128, 181, k1_bf16_0_0, 2}, {182, 362, k1_bf16_0_1, 2}, {363, 724, k1_bf16_0_2, 2}, {725, 1448, k1_bf16_0_3, 2}, {1449, 2896, k1_bf16_0_4, 2}, {2897, 5792, k1_bf16_0_5, 2}, {5793, 8192, k1_bf16_0_6, 3}};
static constexpr Span k1_bf16_1_0[] = {{1, 949, 4, true}, {950, 16384, 5, false}};
static constexpr Span k1_bf16_1_1[] = {{1, 539, 4, true}, {540, 16384, 5, false}};
static constexpr Span k1_bf16_1_2[] = {{1, 138, 4, true}, {139, 2221, 5, true}, {2222, 16384, 5, false}};
static constexpr Span k1_bf16_1_3[] = {{1, 73, 4, true}, {74, 991, 5, true}, {992, 1130, 5, false}, {1131, 9139, 5, true}, {9140, 16384, 5, false}};
static constexpr Span k1_bf16_1_4[] = {{1, 37, 4, false}, {38, 16384, 5, true}};
static constexpr Span k1_bf16_1_5[] = {{1, 27, 4, false}, {28, 16384, 5, true}};
static constexpr Span k1_bf16_1_6[] = {{1, 12, 4, false}, {13, 16384, 5, true}};
static constexpr Row k1_bf16_1[] = {{128, 181, k1_bf16_1_0, 2}, {182, 362, k1_bf16_1_1, 2}, {363, 724, k1_bf16_1_2, 3}, {725, 1448, k1_bf16_1_3, 5}, {1449, 2896, k1_bf16_1_4, 2}, {2897, 5792, k1_bf16_1_5, 2}, {5793, 8192, k1_bf16_1_6, 2}};
static constexpr Span k1_bf16_4_0[] = {{1, 1010, 4, true}, {1011, 16384, 5, false}};
static constexpr Span k1_bf16_4_1[] = {{1, 583, 4, true}, {584, 16384, 5, false}};
static constexpr Span k1_bf16_4_2[] = {{1, 138, 4, true}, {139, 1678, 5, true}, {1679, 16384, 5, false}};
static constexpr Span k1_bf16_4_3[] = {{1, 74, 4, true}, {75, 2841, 5, true}, {2842, 16384, 5, false}};
static constexpr Span k1_bf16_4_4[] = {{1, 38, 4, false}, {39, 16384, 5, true}};
static constexpr Span k1_bf16_4_5[] = {{1, 27, 4, false}, {28, 16384, 5, true}};
static constexpr Span k1_bf16_4_6[] = {{1, 12, 4, false}, {13, 16384, 5, true}};
static constexpr Row k1_bf16_4[] = {{128, 181, k1_bf16_4_0, 2}, {182, 362, k1_bf16_4_1, 2}, {363, 724, k1_bf16_4_2, 3}, {725, 1448, k1_bf16_4_3, 3}, {1449, 2896, k1_bf16_4_4, 2}, {2897, 5792, k1_bf16_4_5, 2}, {5793, 8192, k1_bf16_4_6, 2}};
static constexpr Span k1_bf16_5_0[] = {{1, 999, 4, false}, {1000, 16384, 5, false}};
static constexpr Span k1_bf16_5_1[] = {{1, 621, 4, true}, {622, 16384, 5, false}};
static constexpr Span k1_bf16_5_2[] = {{1, 144, 4, true}, {145, 1796, 5, true}, {1797, 16384, 5, false}};
static constexpr Span k1_bf16_5_3[] = {{1, 77, 4, true}, {78, 665, 5, true}, {666, 1719, 5, false}, {1720, 2441, 5, true}, {2442, 16384, 5, false}};
static constexpr Span k1_bf16_5_4[] = {{1, 32, 4, false}, {33, 6466, 5, true}, {6467, 16384, 5, false}};
static constexpr Span k1_bf16_5_5[] = {{1, 25, 4, false}, {26, 16384, 5, true}};
static constexpr Span k1_bf16_5_6[] = {{1, 21, 4, true}, {22, 16384, 5, true}};
static constexpr Row k1_bf16_5[] = {{128, 181, k1_bf16_5_0, 2}, {182, 362, k1_bf16_5_1, 2}, {363, 724, k1_bf16_5_2, 3}, {725, 1448, k1_bf16_5_3, 5}, {1449, 2896, k1_bf16_5_4, 3}, {2897, 5792, k1_bf16_5_5, 2}, {5793, 8192, k1_bf16_5_6, 2}};
static constexpr Span k1_bf16_6_0[] = {{1, 1003, 4, true}, {1004, 16384, 5, false}};
static constexpr Span k1_bf16_6_1[] = {{1, 1, 4, false}, {2, 599, 4, true}, {600, 16384, 5, false}};
static constexpr Span k1_bf16_6_2[] = {{1, 128, 4, true}, {129, 1809, 5, true}, {1810, 16384, 5, false}};
static constexpr Span k1_bf16_6_3[] = {{1, 70, 4, true}, {71, 3740, 5, true}, {3741, 16384, 5, false}};
static constexpr Span k1_bf16_6_4[] = {{1, 39, 4, false}, {40, 16384, 5, true}};
static constexpr Span k1_bf16_6_5[] = {{1, 27, 4, false}, {28, 16384, 5, true}};
static constexpr Span k1_bf16_6_6[] = {{1, 11, 4, false}, {12, 16384, 5, true}};
static constexpr Row k1_bf16_6[] = {{128, 181, k1_bf16_6_0, 2}, {182, 362, k1_bf16_6_1, 3}, {363, 724, k1_bf16_6_2, 3}, {725, 1448, k1_bf16_6_3, 3}, {1449, 2896, k1_bf16_6_4, 2}, {2897, 5792, k1_bf16_6_5, 2}, {5793, 8192, k1_bf16_6_6, 2}};
static constexpr Span k1_bf16_7_0[] = {{1, 996, 4, false}, {997, 16384, 5, false}};
static constexpr Span k1_bf16_7_1[] = {{1, 623, 4, true}, {624, 16384, 5, false}};
static constexpr Span k1_bf16_7_2[] = {{1, 156, 4, true}, {157, 1677, 5, true}, {1678, 16384, 5, false}};
static constexpr Span k1_bf16_7_3[] = {{1, 81, 4, true}, {82, 1496, 5, true}, {1497, 16384, 5, false}};
static constexpr Span k1_bf16_7_4[] = {{1, 34, 4, false}, {35, 6516, 5, true}, {6517, 16384, 5, false}};
static constexpr Span k1_bf16_7_5[] = {{1, 5, 4, false}, {6, 26, 4, true}, {27, 16384, 5, true}};
static constexpr Span k1_bf16_7_6[] = {{1, 21, 4, true}, {22, 16384, 5, true}};
static constexpr Row k1_bf16_7[] = {{128, 181, k1_bf16_7_0, 2}, {182, 362, k1_bf16_7_1, 2}, {363, 724, k1_bf16_7_2, 3}, {725, 1448, k1_bf16_7_3, 3}, {1449, 2896, k1_bf16_7_4, 3}, {2897, 5792, k1_bf16_7_5, 3}, {5793, 8192, k1_bf16_7_6, 2}};
static constexpr Span k1_bf16_68_0[] = {{1, 947, 4, true}, {948, 16384, 5, false}};
static constexpr Span k1_bf16_68_1[] = {{1, 577, 4, true}, {578, 16384, 5, false}};
static constexpr Span k1_bf16_68_2[] = {{1, 148, 4, true}, {149, 942, 5, true}, {943, 16384, 5, false}};
static constexpr Span k1_bf16_68_3[] = {{1, 77, 4, true}, {78, 1624, 5, true}, {1625, 16384, 5, false}};
static constexpr Span k1_bf16_68_4[] = {{1, 43, 4, true}, {44, 5651, 5, true}, {5652, 16384, 5, false}};
static constexpr Span k1_bf16_68_5[] = {{1, 26, 4, false}, {27, 16384, 5, true}};
static constexpr Span k1_bf16_68_6[] = {{1, 11, 4, false}, {12, 16384, 5, true}};
static constexpr Row k1_bf16_68[] = {{128, 181, k1_bf16_68_0, 2}, {182, 362, k1_bf16_68_1, 2}, {363, 724, k1_bf16_68_2, 3}, {725, 1448, k1_bf16_68_3, 3}, {1449, 2896, k1_bf16_68_4, 3}, {2897, 5792, k1_bf16_68_5, 2}, {5793, 8192, k1_bf16_68_6, 2}};
static constexpr Span k1_bf16_70_0[] = {{1, 937, 4, true}, {938, 16384, 5, false}};
static constexpr Span k1_bf16_70_1[] = {{1, 578, 4, true}, {579, 16384, 5, false}};
static constexpr Span k1_bf16_70_2[] = {{1, 148, 4, true}, {149, 932, 5, true}, {933, 16384, 5, false}};
static constexpr Span k1_bf16_70_3[] = {{1, 77, 4, true}, {78, 1648, 5, true}, {1649, 16384, 5, false}};
static constexpr Span k1_bf16_70_4[] = {{1, 43, 4, true}, {44, 6250, 5, true}, {6251, 16384, 5, false}};
static constexpr Span k1_bf16_70_5[] = {{1, 24, 4, false}, {25, 16384, 5, true}};
static constexpr Span k1_bf16_70_6[] = {{1, 11, 4, false}, {12, 16384, 5, true}};
static constexpr Row k1_bf16_70[] = {{128, 181, k1_bf16_70_0, 2}, {182, 362, k1_bf16_70_1, 2}, {363, 724, k1_bf16_70_2, 3}, {725, 1448, k1_bf16_70_3, 3}, {1449, 2896, k1_bf16_70_4, 3}, {2897, 5792, k1_bf16_70_5, 2}, {5793, 8192, k1_bf16_70_6, 2}};
static constexpr Span k1_bf16_1_sharded_0[] = {{1, 37, 4, false}, {38, 75, 5, true}, {76, 152, 64, true}, {153, 451, 5, true}, {452, 16384, 64, true}};
static constexpr Span k1_bf16_1_sharded_1[] = {{1, 25, 4, false}, {26, 87, 64, true}, {88, 183, 5, true}, {184, 16384, 64, true}};
static constexpr Span k1_bf16_1_sharded_2[] = {{1, 12, 4, false}, {13, 181, 5, true}, {182, 16384, 64, true}};
static constexpr Row k1_bf16_1_sharded[] = {{2048, 2896, k1_bf16_1_sharded_0, 5}, {2897, 5792, k1_bf16_1_sharded_1, 4}, {5793, 8192, k1_bf16_1_sharded_2, 3}};
static constexpr Span k1_bf16_4_sharded_0[] = {{1, 33, 4, false}, {34, 16384, 64, true}};
static constexpr Span k1_bf16_4_sharded_1[] = {{1, 22, 4, false}, {23, 16384, 64, true}};
static constexpr Span k1_bf16_4_sharded_2[] = {{1, 12, 4, false}, {13, 22, 5, true}, {23, 16384, 64, true}};
static constexpr Row k1_bf16_4_sharded[] = {{2048, 2896, k1_bf16_4_sharded_0, 2}, {2897, 5792, k1_bf16_4_sharded_1, 2}, {5793, 8192, k1_bf16_4_sharded_2, 3}};
static constexpr Span k1_bf16_6_sharded_0[] = {{1, 26, 4, false}, {27, 84, 64, true}, {85, 193, 5, true}, {194, 4096, 64, true}};
static constexpr Span k1_bf16_6_sharded_1[] = {{1, 11, 4, false}, {12, 173, 5, true}, {174, 16384, 64, true}};
static constexpr Row k1_bf16_6_sharded[] = {{4096, 5792, k1_bf16_6_sharded_0, 4}, {5793, 8192, k1_bf16_6_sharded_1, 3}};
static constexpr Span k1_bf16_68_sharded_0[] = {{1, 23, 4, false}, {24, 4096, 64, true}};
static constexpr Span k1_bf16_68_sharded_1[] = {{1, 11, 4, false}, {12, 44, 5, true}, {45, 16384, 64, true}};
static constexpr Row k1_bf16_68_sharded[] = {{4096, 5792, k1_bf16_68_sharded_0, 2}, {5793, 8192, k1_bf16_68_sharded_1, 3}};
static constexpr Span k1_bf16_70_sharded_0[] = {{1, 24, 4, false}, {25, 77, 64, true}, {78, 230, 5, true}, {231, 4096, 64, true}};
static constexpr Span k1_bf16_70_sharded_1[] = {{1, 11, 4, false}, {12, 148, 5, true}, {149, 16384, 64, true}};
static constexpr Row k1_bf16_70_sharded[] = {{4096, 5792, k1_bf16_70_sharded_0, 4}, {5793, 8192, k1_bf16_70_sharded_1, 3}};
static constexpr Span k1_bf16_1_gemm_0[] = {{64, 11562, 3, false}, {11563, 16384, 65, true}};
static constexpr Span k1_bf16_1_gemm_1[] = {{64, 5771, 3, false}, {5772, 11585, 65, true}, {11586, 16384, 3, false}};
static constexpr Span k1_bf16_1_gemm_2[] = {{64, 2797, 3, false}, {2798, 5792, 65, true}, {5793, 16384, 3, false}};
static constexpr Row k1_bf16_1_gemm[] = {{2048, 2896, k1_bf16_1_gemm_0, 2}, {2897, 5792, k1_bf16_1_gemm_1, 3}, {5793, 8192, k1_bf16_1_gemm_2, 3}};
static constexpr Span k1_bf16_4_gemm_0[] = {{64, 16384, 3, false}};
static constexpr Span k1_bf16_4_gemm_1[] = {{64, 5870, 3, false}, {5871, 16384, 65, true}};
static constexpr Span k1_bf16_4_gemm_2[] = {{64, 2169, 3, false}, {2170, 11585, 65, true}, {11586, 16384, 3, false}};
static constexpr Row k1_bf16_4_gemm[] = {{2048, 2896, k1_bf16_4_gemm_0, 1}, {2897, 5792, k1_bf16_4_gemm_1, 2}, {5793, 8192, k1_bf16_4_gemm_2, 3}};
static constexpr Span k1_bf16_6_gemm_0[] = {{64, 4096, 3, false}};
static constexpr Span k1_bf16_6_gemm_1[] = {{64, 2437, 3, false}, {2438, 5792, 65, true}, {5793, 16384, 3, false}};
static constexpr Row k1_bf16_6_gemm[] = {{4096, 5792, k1_bf16_6_gemm_0, 1}, {5793, 8192, k1_bf16_6_gemm_1, 3}};
static constexpr Span k1_bf16_68_gemm_0[] = {{64, 4096, 3, false}};
static constexpr Span k1_bf16_68_gemm_1[] = {{64, 2235, 3, false}, {2236, 11585, 65, true}, {11586, 16384, 3, false}};
static constexpr Row k1_bf16_68_gemm[] = {{4096, 5792, k1_bf16_68_gemm_0, 1}, {5793, 8192, k1_bf16_68_gemm_1, 3}};
static constexpr Span k1_bf16_70_gemm_0[] = {{64, 2048, 3, false}};
static constexpr Span k1_bf16_70_gemm_1[] = {{64, 2394, 3, false}, {2395, 5792, 65, true}, {5793, 16384, 3, false}};
static constexpr Row k1_bf16_70_gemm[] = {{4096, 5792, k1_bf16_70_gemm_0, 1}, {5793, 8192, k1_bf16_70_gemm_1, 3}};
static constexpr Model k1_seed_0[] = {{0, false, 21647555556ULL, 4960ULL, 765007ULL}, {4, false, 1783732283ULL, 8920ULL, 0ULL}, {5, false, 3208819248ULL, 4195ULL, 0ULL}};
static constexpr Model k1_seed_1[] = {{0, false, 11681139853ULL, 5769ULL, 1416318ULL}, {4, true, 2586850000ULL, 9150ULL, 666455ULL}, {5, true, 3692390386ULL, 4727ULL, 1521262ULL}, {4, false, 2711520737ULL, 10449ULL, 8929ULL}, {5, false, 4203380952ULL, 5442ULL, 249716ULL}};
static constexpr Model k1_seed_4[] = {{0, false, 11876460568ULL, 5688ULL, 1421267ULL}, {4, true, 2763514459ULL, 9031ULL, 747541ULL}, {5, true, 3847413357ULL, 4728ULL, 1745589ULL}, {4, false, 2900514117ULL, 10361ULL, 38037ULL}, {5, false, 4408492974ULL, 5419ULL, 283892ULL}};
static constexpr Model k1_seed_5[] = {{0, false, 12229925598ULL, 6368ULL, 1089691ULL}, {4, true, 2977958796ULL, 9443ULL, 1207529ULL}, {5, true, 4099109123ULL, 5120ULL, 2648069ULL}, {4, false, 3143666667ULL, 10733ULL, 1628ULL}, {5, false, 4682498952ULL, 5925ULL, 239731ULL}};
static constexpr Model k1_seed_6[] = {{0, false, 11913497116ULL, 5944ULL, 1314298ULL}, {4, true, 2813768627ULL, 9103ULL, 746627ULL}, {5, true, 3859441453ULL, 4760ULL, 1849677ULL}, {4, false, 2888597030ULL, 10462ULL, 60484ULL}, {5, false, 4376403131ULL, 5579ULL, 237066ULL}};
static constexpr Model k1_seed_7[] = {{0, false, 12225000000ULL, 6323ULL, 1223807ULL}, {4, true, 3027092342ULL, 9506ULL, 1215953ULL}, {5, true, 4190037182ULL, 5159ULL, 2678946ULL}, {4, false, 3158492669ULL, 10866ULL, 0ULL}, {5, false, 4687274510ULL, 5876ULL, 253045ULL}};
static constexpr Model k1_seed_68[] = {{0, false, 12052761905ULL, 5899ULL, 1367467ULL}, {4, true, 2745855895ULL, 9195ULL, 920638ULL}, {5, true, 3887023753ULL, 4857ULL, 2051245ULL}, {4, false, 2910476863ULL, 10485ULL, 24479ULL}, {5, false, 4443053848ULL, 5398ULL, 258443ULL}};
static constexpr Model k1_seed_70[] = {{0, false, 12081261261ULL, 6062ULL, 1329691ULL}, {4, true, 2754236897ULL, 9284ULL, 927263ULL}, {5, true, 3887509271ULL, 4911ULL, 2284955ULL}, {4, false, 2909238682ULL, 10626ULL, 0ULL}, {5, false, 4457651663ULL, 5645ULL, 131442ULL}};
static constexpr Table kTables[] = {
    {90, "nvlink", 2, "b956c70e26b011698fa83b18e3853b51f3baf11da616e54f570c2327906e630d", 128LL, 33554432LL,
     {{{{k0_bf16_0, 7}, {k0_bf16_1, 7}, {k0_bf16_4, 7}, {k0_bf16_5, 7}, {k0_bf16_6, 7}, {k0_bf16_7, 7}, {k0_bf16_68, 7}, {k0_bf16_70, 7}}, {{k0_bf16_0, 7}, {k0_bf16_1, 7}, {k0_bf16_4, 7}, {k0_bf16_5, 7}, {k0_bf16_6, 7}, {k0_bf16_7, 7}, {k0_bf16_68, 7}, {k0_bf16_70, 7}}, {{nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}}},
      {{{nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}}, {{nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}}, {{nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}}},
      {{{nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}}, {{nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}}, {{nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}}}},
     {{k0_seed_0, 3}, {k0_seed_1, 5}, {k0_seed_4, 5}, {k0_seed_5, 5}, {k0_seed_6, 5}, {k0_seed_7, 5}, {k0_seed_68, 5}, {k0_seed_70, 5}}},
    {90, "nvlink", 4, "25dd9a2358f72a491f7d2f70817f36b963aad0ccd4462c79c5dc88231747dc68", 64LL, 67108864LL,
     {{{{k1_bf16_0, 7}, {k1_bf16_1, 7}, {k1_bf16_4, 7}, {k1_bf16_5, 7}, {k1_bf16_6, 7}, {k1_bf16_7, 7}, {k1_bf16_68, 7}, {k1_bf16_70, 7}}, {{k1_bf16_0, 7}, {k1_bf16_1, 7}, {k1_bf16_4, 7}, {k1_bf16_5, 7}, {k1_bf16_6, 7}, {k1_bf16_7, 7}, {k1_bf16_68, 7}, {k1_bf16_70, 7}}, {{nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}}},
      {{{nullptr, 0}, {k1_bf16_1_sharded, 3}, {k1_bf16_4_sharded, 3}, {nullptr, 0}, {k1_bf16_6_sharded, 2}, {nullptr, 0}, {k1_bf16_68_sharded, 2}, {k1_bf16_70_sharded, 2}}, {{nullptr, 0}, {k1_bf16_1_sharded, 3}, {k1_bf16_4_sharded, 3}, {nullptr, 0}, {k1_bf16_6_sharded, 2}, {nullptr, 0}, {k1_bf16_68_sharded, 2}, {k1_bf16_70_sharded, 2}}, {{nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}}},
      {{{nullptr, 0}, {k1_bf16_1_gemm, 3}, {k1_bf16_4_gemm, 3}, {nullptr, 0}, {k1_bf16_6_gemm, 2}, {nullptr, 0}, {k1_bf16_68_gemm, 2}, {k1_bf16_70_gemm, 2}}, {{nullptr, 0}, {k1_bf16_1_gemm, 3}, {k1_bf16_4_gemm, 3}, {nullptr, 0}, {k1_bf16_6_gemm, 2}, {nullptr, 0}, {k1_bf16_68_gemm, 2}, {k1_bf16_70_gemm, 2}}, {{nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}}}},
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

// Whether sequence parallelism has a fusion, by its place.
inline bool shards(int place) {
    constexpr bool kShards[] = {false, true, true, false, true, false, true, true};
    return kShards[place];
}

template <typename Range>
const Range* holding(const Range* ranges, int count, std::int64_t value) {
    const auto before = [](std::int64_t v, const Range& range) { return v < range.first; };
    const Range* after = std::upper_bound(ranges, ranges + count, value, before);
    return after == ranges || value > (after - 1)->last ? nullptr : after - 1;
}

// What to run for a tensor [tokens, hidden] of `dtype` per rank. Throws unless tokens and hidden are at least 1.
inline Answer lookup(const Table& table, Dtype dtype, int fusion, std::int64_t tokens, std::int64_t hidden,
                     Caller caller = REPLICATED) {
    if (tokens < 1 || hidden < 1) throw std::invalid_argument("no message has fewer than 1 token or hidden size");
    const int place = fusion_place(fusion);
    constexpr std::int64_t kMaxBytes = 274877906944LL, kMaxTokens = 268435456LL;
    constexpr std::int64_t kItem[] = {2, 2, 4};
    const std::int64_t t = std::min(tokens, kMaxBytes), h = std::min(hidden, kMaxBytes);
    const std::int64_t bytes = h > kMaxBytes / t ? kMaxBytes : std::min(t * h * kItem[dtype], kMaxBytes);
    for (int who = shards(place) ? caller : REPLICATED; who >= REPLICATED; --who) {
        const Section& section = table.sections[who][dtype][place];
        const Row* row = holding(section.rows, section.count, hidden);
        const Span* span = row ? holding(row->spans, row->count, tokens) : nullptr;
        if (span && span->strategy != 3) return {span->strategy, span->fused, true};
        if (span || who == REPLICATED || tokens < table.rs_norm_ag_min_tokens) continue;
        if (who == GEMM && bytes >= table.gemm_rs_min_bytes) return {65, true, false};
        if (who == SHARDED) return {64, true, false};
    }
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
