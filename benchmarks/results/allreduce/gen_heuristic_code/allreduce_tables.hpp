// SPDX-License-Identifier: Apache-2.0
// All-reduce tables by ranges of tokens and hidden sizes, written by `phalanx allreduce codegen`: tune again rather than edit.
// lookup() answers like phalanx.tables.Table.lookup in Python on every size; a test compiles this and compares.
// sm90.nvlink.tp2 sha256:533403020d105a21125c1433976f6912a83d1efa64ab6fb7e56a55a60ed78a04
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
static constexpr Span k0_bf16_0_1[] = {{1, 8479, 4, false}, {8480, 16384, 5, false}};
static constexpr Span k0_bf16_0_2[] = {{1, 4246, 4, false}, {4247, 16384, 5, false}};
static constexpr Span k0_bf16_0_3[] = {{1, 2146, 4, false}, {2147, 16384, 5, false}};
static constexpr Span k0_bf16_0_4[] = {{1, 1077, 4, false}, {1078, 16384, 5, false}};
static constexpr Span k0_bf16_0_5[] = {{1, 537, 4, false}, {538, 16384, 5, false}};
static constexpr Span k0_bf16_0_6[] = {{1, 262, 4, false}, {263, 16384, 5, false}};
static constexpr Row k0_bf16_0[] = {{128, 181, k0_bf16_0_0, 1}, {182, 362, k0_bf16_0_1, 2}, {363, 724, k0_bf16_0_2, 2}, {725, 1448, k0_bf16_0_3, 2}, {1449, 2896, k0_bf16_0_4, 2}, {2897, 5792, k0_bf16_0_5, 2}, {5793, 8192, k0_bf16_0_6, 2}};
static constexpr Span k0_bf16_1_0[] = {{1, 780, 4, true}, {781, 2861, 4, false}, {2862, 16384, 4, true}};
static constexpr Span k0_bf16_1_1[] = {{1, 8902, 4, true}, {8903, 16384, 5, false}};
static constexpr Span k0_bf16_1_2[] = {{1, 5743, 4, true}, {5744, 16384, 5, false}};
static constexpr Span k0_bf16_1_3[] = {{1, 238, 4, true}, {239, 270, 5, true}, {271, 5188, 4, true}, {5189, 16384, 5, false}};
static constexpr Span k0_bf16_1_4[] = {{1, 2896, 4, true}, {2897, 16384, 5, true}};
static constexpr Span k0_bf16_1_5[] = {{1, 58, 4, true}, {59, 501, 5, true}, {502, 2651, 4, true}, {2652, 16384, 5, true}};
static constexpr Span k0_bf16_1_6[] = {{1, 11, 4, true}, {12, 26, 4, false}, {27, 368, 5, true}, {369, 16384, 4, true}};
static constexpr Row k0_bf16_1[] = {{128, 181, k0_bf16_1_0, 3}, {182, 362, k0_bf16_1_1, 2}, {363, 724, k0_bf16_1_2, 2}, {725, 1448, k0_bf16_1_3, 4}, {1449, 2896, k0_bf16_1_4, 2}, {2897, 5792, k0_bf16_1_5, 4}, {5793, 8192, k0_bf16_1_6, 4}};
static constexpr Span k0_bf16_4_0[] = {{1, 1226, 4, true}, {1227, 5442, 4, false}, {5443, 10680, 4, true}, {10681, 16384, 4, false}};
static constexpr Span k0_bf16_4_1[] = {{1, 7416, 4, true}, {7417, 16384, 5, false}};
static constexpr Span k0_bf16_4_2[] = {{1, 6050, 4, true}, {6051, 16384, 5, false}};
static constexpr Span k0_bf16_4_3[] = {{1, 1604, 4, true}, {1605, 4666, 4, false}, {4667, 16384, 5, false}};
static constexpr Span k0_bf16_4_4[] = {{1, 3666, 4, true}, {3667, 16384, 5, true}};
static constexpr Span k0_bf16_4_5[] = {{1, 90, 4, true}, {91, 231, 5, true}, {232, 3287, 4, true}, {3288, 16384, 5, true}};
static constexpr Span k0_bf16_4_6[] = {{1, 12, 4, true}, {13, 21, 4, false}, {22, 366, 5, true}, {367, 16384, 4, true}};
static constexpr Row k0_bf16_4[] = {{128, 181, k0_bf16_4_0, 4}, {182, 362, k0_bf16_4_1, 2}, {363, 724, k0_bf16_4_2, 2}, {725, 1448, k0_bf16_4_3, 3}, {1449, 2896, k0_bf16_4_4, 2}, {2897, 5792, k0_bf16_4_5, 4}, {5793, 8192, k0_bf16_4_6, 4}};
static constexpr Span k0_bf16_5_0[] = {{1, 16384, 4, false}};
static constexpr Span k0_bf16_5_1[] = {{1, 1528, 4, true}, {1529, 9167, 4, false}, {9168, 16384, 5, false}};
static constexpr Span k0_bf16_5_2[] = {{1, 2896, 4, true}, {2897, 8997, 4, false}, {8998, 16384, 5, false}};
static constexpr Span k0_bf16_5_3[] = {{1, 220, 4, true}, {221, 291, 5, true}, {292, 763, 4, true}, {764, 1479, 5, true}, {1480, 4700, 4, false}, {4701, 16384, 5, false}};
static constexpr Span k0_bf16_5_4[] = {{1, 103, 4, true}, {104, 362, 5, true}, {363, 1393, 4, true}, {1394, 5014, 5, true}, {5015, 16384, 5, false}};
static constexpr Span k0_bf16_5_5[] = {{1, 45, 4, true}, {46, 396, 5, true}, {397, 2896, 4, true}, {2897, 16384, 5, true}};
static constexpr Span k0_bf16_5_6[] = {{1, 16, 4, false}, {17, 389, 5, true}, {390, 3104, 4, true}, {3105, 16384, 5, true}};
static constexpr Row k0_bf16_5[] = {{128, 181, k0_bf16_5_0, 1}, {182, 362, k0_bf16_5_1, 3}, {363, 724, k0_bf16_5_2, 3}, {725, 1448, k0_bf16_5_3, 6}, {1449, 2896, k0_bf16_5_4, 5}, {2897, 5792, k0_bf16_5_5, 4}, {5793, 8192, k0_bf16_5_6, 4}};
static constexpr Span k0_bf16_6_0[] = {{1, 1107, 4, true}, {1108, 6066, 4, false}, {6067, 11418, 4, true}, {11419, 16384, 5, false}};
static constexpr Span k0_bf16_6_1[] = {{1, 7053, 4, true}, {7054, 16384, 5, false}};
static constexpr Span k0_bf16_6_2[] = {{1, 5519, 4, true}, {5520, 16384, 5, false}};
static constexpr Span k0_bf16_6_3[] = {{1, 1599, 4, true}, {1600, 4592, 4, false}, {4593, 16384, 5, false}};
static constexpr Span k0_bf16_6_4[] = {{1, 3143, 4, true}, {3144, 16384, 5, true}};
static constexpr Span k0_bf16_6_5[] = {{1, 3, 4, true}, {4, 55, 4, false}, {56, 323, 5, true}, {324, 2566, 4, true}, {2567, 16384, 5, true}};
static constexpr Span k0_bf16_6_6[] = {{1, 10, 4, true}, {11, 19, 4, false}, {20, 337, 5, true}, {338, 16384, 4, true}};
static constexpr Row k0_bf16_6[] = {{128, 181, k0_bf16_6_0, 4}, {182, 362, k0_bf16_6_1, 2}, {363, 724, k0_bf16_6_2, 2}, {725, 1448, k0_bf16_6_3, 3}, {1449, 2896, k0_bf16_6_4, 2}, {2897, 5792, k0_bf16_6_5, 5}, {5793, 8192, k0_bf16_6_6, 4}};
static constexpr Span k0_bf16_7_0[] = {{1, 16384, 4, false}};
static constexpr Span k0_bf16_7_1[] = {{1, 1512, 4, true}, {1513, 9147, 4, false}, {9148, 16384, 5, false}};
static constexpr Span k0_bf16_7_2[] = {{1, 4076, 4, true}, {4077, 9318, 4, false}, {9319, 16384, 5, false}};
static constexpr Span k0_bf16_7_3[] = {{1, 228, 4, true}, {229, 283, 5, true}, {284, 730, 4, true}, {731, 1169, 5, true}, {1170, 4487, 4, false}, {4488, 16384, 5, false}};
static constexpr Span k0_bf16_7_4[] = {{1, 99, 4, true}, {100, 653, 5, true}, {654, 1466, 4, true}, {1467, 4567, 5, true}, {4568, 16384, 5, false}};
static constexpr Span k0_bf16_7_5[] = {{1, 41, 4, true}, {42, 395, 5, true}, {396, 3053, 4, true}, {3054, 16384, 5, true}};
static constexpr Span k0_bf16_7_6[] = {{1, 17, 4, false}, {18, 379, 5, true}, {380, 3115, 4, true}, {3116, 16384, 5, true}};
static constexpr Row k0_bf16_7[] = {{128, 181, k0_bf16_7_0, 1}, {182, 362, k0_bf16_7_1, 3}, {363, 724, k0_bf16_7_2, 3}, {725, 1448, k0_bf16_7_3, 6}, {1449, 2896, k0_bf16_7_4, 5}, {2897, 5792, k0_bf16_7_5, 4}, {5793, 8192, k0_bf16_7_6, 4}};
static constexpr Span k0_bf16_68_0[] = {{1, 759, 4, true}, {760, 16384, 4, false}};
static constexpr Span k0_bf16_68_1[] = {{1, 2683, 4, true}, {2684, 9161, 4, false}, {9162, 16384, 5, false}};
static constexpr Span k0_bf16_68_2[] = {{1, 3141, 4, true}, {3142, 16384, 5, false}};
static constexpr Span k0_bf16_68_3[] = {{1, 1163, 4, true}, {1164, 4557, 4, false}, {4558, 16384, 5, false}};
static constexpr Span k0_bf16_68_4[] = {{1, 3815, 4, true}, {3816, 16384, 5, false}};
static constexpr Span k0_bf16_68_5[] = {{1, 52, 4, true}, {53, 181, 5, true}, {182, 2448, 4, true}, {2449, 16384, 5, true}};
static constexpr Span k0_bf16_68_6[] = {{1, 12, 4, true}, {13, 20, 4, false}, {21, 374, 5, true}, {375, 16384, 4, true}};
static constexpr Row k0_bf16_68[] = {{128, 181, k0_bf16_68_0, 2}, {182, 362, k0_bf16_68_1, 3}, {363, 724, k0_bf16_68_2, 2}, {725, 1448, k0_bf16_68_3, 3}, {1449, 2896, k0_bf16_68_4, 2}, {2897, 5792, k0_bf16_68_5, 4}, {5793, 8192, k0_bf16_68_6, 4}};
static constexpr Span k0_bf16_70_0[] = {{1, 740, 4, true}, {741, 16384, 4, false}};
static constexpr Span k0_bf16_70_1[] = {{1, 2629, 4, true}, {2630, 11585, 4, false}, {11586, 16384, 5, false}};
static constexpr Span k0_bf16_70_2[] = {{1, 3157, 4, true}, {3158, 16384, 5, false}};
static constexpr Span k0_bf16_70_3[] = {{1, 1139, 4, true}, {1140, 4512, 4, false}, {4513, 16384, 5, false}};
static constexpr Span k0_bf16_70_4[] = {{1, 4853, 4, true}, {4854, 16384, 5, false}};
static constexpr Span k0_bf16_70_5[] = {{1, 53, 4, true}, {54, 297, 5, true}, {298, 3532, 4, true}, {3533, 16384, 5, true}};
static constexpr Span k0_bf16_70_6[] = {{1, 12, 4, true}, {13, 18, 4, false}, {19, 328, 5, true}, {329, 16384, 4, true}};
static constexpr Row k0_bf16_70[] = {{128, 181, k0_bf16_70_0, 2}, {182, 362, k0_bf16_70_1, 3}, {363, 724, k0_bf16_70_2, 2}, {725, 1448, k0_bf16_70_3, 3}, {1449, 2896, k0_bf16_70_4, 2}, {2897, 5792, k0_bf16_70_5, 4}, {5793, 8192, k0_bf16_70_6, 4}};
static constexpr Span k0_bf16_1_sharded_0[] = {{1, 780, 4, true}, {781, 2861, 4, false}, {2862, 16384, 4, true}};
static constexpr Span k0_bf16_1_sharded_1[] = {{1, 2382, 4, true}, {2383, 10576, 64, true}, {10577, 16384, 5, false}};
static constexpr Span k0_bf16_1_sharded_2[] = {{1, 449, 4, true}, {450, 9081, 64, true}, {9082, 16384, 5, false}};
static constexpr Span k0_bf16_1_sharded_3[] = {{1, 238, 4, true}, {239, 276, 5, true}, {277, 1093, 64, true}, {1094, 5188, 4, true}, {5189, 16384, 5, false}};
static constexpr Span k0_bf16_1_sharded_4[] = {{1, 179, 4, true}, {180, 16384, 64, true}};
static constexpr Span k0_bf16_1_sharded_5[] = {{1, 58, 4, true}, {59, 130, 5, true}, {131, 16384, 64, true}};
static constexpr Span k0_bf16_1_sharded_6[] = {{1, 11, 4, true}, {12, 26, 4, false}, {27, 105, 5, true}, {106, 16384, 64, true}};
static constexpr Row k0_bf16_1_sharded[] = {{128, 181, k0_bf16_1_sharded_0, 3}, {182, 362, k0_bf16_1_sharded_1, 3}, {363, 724, k0_bf16_1_sharded_2, 3}, {725, 1448, k0_bf16_1_sharded_3, 5}, {1449, 2896, k0_bf16_1_sharded_4, 2}, {2897, 5792, k0_bf16_1_sharded_5, 3}, {5793, 8192, k0_bf16_1_sharded_6, 4}};
static constexpr Span k0_bf16_4_sharded_0[] = {{1, 1226, 4, true}, {1227, 5442, 4, false}, {5443, 10680, 4, true}, {10681, 16384, 4, false}};
static constexpr Span k0_bf16_4_sharded_1[] = {{1, 2684, 4, true}, {2685, 16384, 64, true}};
static constexpr Span k0_bf16_4_sharded_2[] = {{1, 394, 4, true}, {395, 13289, 64, true}, {13290, 16384, 5, false}};
static constexpr Span k0_bf16_4_sharded_3[] = {{1, 220, 4, true}, {221, 16384, 64, true}};
static constexpr Span k0_bf16_4_sharded_4[] = {{1, 117, 4, true}, {118, 16384, 64, true}};
static constexpr Span k0_bf16_4_sharded_5[] = {{1, 57, 4, true}, {58, 16384, 64, true}};
static constexpr Span k0_bf16_4_sharded_6[] = {{1, 14, 4, true}, {15, 16384, 64, true}};
static constexpr Row k0_bf16_4_sharded[] = {{128, 181, k0_bf16_4_sharded_0, 4}, {182, 362, k0_bf16_4_sharded_1, 2}, {363, 724, k0_bf16_4_sharded_2, 3}, {725, 1448, k0_bf16_4_sharded_3, 2}, {1449, 2896, k0_bf16_4_sharded_4, 2}, {2897, 5792, k0_bf16_4_sharded_5, 2}, {5793, 8192, k0_bf16_4_sharded_6, 2}};
static constexpr Span k0_bf16_6_sharded_0[] = {{1, 1107, 4, true}, {1108, 6066, 4, false}, {6067, 11418, 4, true}, {11419, 16384, 5, false}};
static constexpr Span k0_bf16_6_sharded_1[] = {{1, 7053, 4, true}, {7054, 16384, 5, false}};
static constexpr Span k0_bf16_6_sharded_2[] = {{1, 470, 4, true}, {471, 7517, 64, true}, {7518, 16384, 5, false}};
static constexpr Span k0_bf16_6_sharded_3[] = {{1, 300, 4, true}, {301, 1814, 64, true}, {1815, 4592, 4, false}, {4593, 16384, 5, false}};
static constexpr Span k0_bf16_6_sharded_4[] = {{1, 153, 4, true}, {154, 16384, 64, true}};
static constexpr Span k0_bf16_6_sharded_5[] = {{1, 3, 4, true}, {4, 22, 4, false}, {23, 80, 4, true}, {81, 16384, 64, true}};
static constexpr Span k0_bf16_6_sharded_6[] = {{1, 10, 4, true}, {11, 19, 4, false}, {20, 121, 5, true}, {122, 16384, 64, true}};
static constexpr Row k0_bf16_6_sharded[] = {{128, 181, k0_bf16_6_sharded_0, 4}, {182, 362, k0_bf16_6_sharded_1, 2}, {363, 724, k0_bf16_6_sharded_2, 3}, {725, 1448, k0_bf16_6_sharded_3, 4}, {1449, 2896, k0_bf16_6_sharded_4, 2}, {2897, 5792, k0_bf16_6_sharded_5, 4}, {5793, 8192, k0_bf16_6_sharded_6, 4}};
static constexpr Span k0_bf16_68_sharded_0[] = {{1, 759, 4, true}, {760, 16384, 4, false}};
static constexpr Span k0_bf16_68_sharded_1[] = {{1, 2683, 4, true}, {2684, 9161, 4, false}, {9162, 16384, 5, false}};
static constexpr Span k0_bf16_68_sharded_2[] = {{1, 445, 4, true}, {446, 10028, 64, true}, {10029, 16384, 5, false}};
static constexpr Span k0_bf16_68_sharded_3[] = {{1, 225, 4, true}, {226, 16384, 64, true}};
static constexpr Span k0_bf16_68_sharded_4[] = {{1, 114, 4, true}, {115, 16384, 64, true}};
static constexpr Span k0_bf16_68_sharded_5[] = {{1, 52, 4, true}, {53, 16384, 64, true}};
static constexpr Span k0_bf16_68_sharded_6[] = {{1, 12, 4, true}, {13, 20, 4, false}, {21, 39, 5, true}, {40, 16384, 64, true}};
static constexpr Row k0_bf16_68_sharded[] = {{128, 181, k0_bf16_68_sharded_0, 2}, {182, 362, k0_bf16_68_sharded_1, 3}, {363, 724, k0_bf16_68_sharded_2, 3}, {725, 1448, k0_bf16_68_sharded_3, 2}, {1449, 2896, k0_bf16_68_sharded_4, 2}, {2897, 5792, k0_bf16_68_sharded_5, 2}, {5793, 8192, k0_bf16_68_sharded_6, 4}};
static constexpr Span k0_bf16_70_sharded_0[] = {{1, 740, 4, true}, {741, 16384, 4, false}};
static constexpr Span k0_bf16_70_sharded_1[] = {{1, 2629, 4, true}, {2630, 11585, 4, false}, {11586, 16384, 5, false}};
static constexpr Span k0_bf16_70_sharded_2[] = {{1, 476, 4, true}, {477, 3584, 64, true}, {3585, 16384, 5, false}};
static constexpr Span k0_bf16_70_sharded_3[] = {{1, 303, 4, true}, {304, 16384, 64, true}};
static constexpr Span k0_bf16_70_sharded_4[] = {{1, 172, 4, true}, {173, 16384, 64, true}};
static constexpr Span k0_bf16_70_sharded_5[] = {{1, 53, 4, true}, {54, 132, 5, true}, {133, 16384, 64, true}};
static constexpr Span k0_bf16_70_sharded_6[] = {{1, 12, 4, true}, {13, 18, 4, false}, {19, 110, 5, true}, {111, 16384, 64, true}};
static constexpr Row k0_bf16_70_sharded[] = {{128, 181, k0_bf16_70_sharded_0, 2}, {182, 362, k0_bf16_70_sharded_1, 3}, {363, 724, k0_bf16_70_sharded_2, 3}, {725, 1448, k0_bf16_70_sharded_3, 2}, {1449, 2896, k0_bf16_70_sharded_4, 2}, {2897, 5792, k0_bf16_70_sharded_5, 3}, {5793, 8192, k0_bf16_70_sharded_6, 4}};
static constexpr Span k0_bf16_1_gemm_0[] = {{32, 16384, 3, false}};
static constexpr Span k0_bf16_1_gemm_1[] = {{32, 14129, 3, false}, {14130, 16384, 65, true}};
static constexpr Span k0_bf16_1_gemm_2[] = {{32, 6502, 3, false}, {6503, 11126, 65, true}, {11127, 16384, 3, false}};
static constexpr Span k0_bf16_1_gemm_3[] = {{32, 2795, 3, false}, {2796, 16384, 65, true}};
static constexpr Span k0_bf16_1_gemm_4[] = {{32, 5052, 3, false}, {5053, 16384, 65, true}};
static constexpr Span k0_bf16_1_gemm_5[] = {{32, 2835, 3, false}, {2836, 11585, 65, true}, {11586, 16384, 3, false}};
static constexpr Span k0_bf16_1_gemm_6[] = {{32, 1370, 3, false}, {1371, 5792, 65, true}, {5793, 16384, 3, false}};
static constexpr Row k0_bf16_1_gemm[] = {{128, 181, k0_bf16_1_gemm_0, 1}, {182, 362, k0_bf16_1_gemm_1, 2}, {363, 724, k0_bf16_1_gemm_2, 3}, {725, 1448, k0_bf16_1_gemm_3, 2}, {1449, 2896, k0_bf16_1_gemm_4, 2}, {2897, 5792, k0_bf16_1_gemm_5, 3}, {5793, 8192, k0_bf16_1_gemm_6, 3}};
static constexpr Span k0_bf16_4_gemm_0[] = {{32, 16384, 3, false}};
static constexpr Span k0_bf16_4_gemm_1[] = {{32, 16384, 3, false}};
static constexpr Span k0_bf16_4_gemm_2[] = {{32, 8569, 3, false}, {8570, 16384, 65, true}};
static constexpr Span k0_bf16_4_gemm_3[] = {{32, 5136, 3, false}, {5137, 16384, 65, true}};
static constexpr Span k0_bf16_4_gemm_4[] = {{32, 3119, 3, false}, {3120, 16384, 65, true}};
static constexpr Span k0_bf16_4_gemm_5[] = {{32, 1675, 3, false}, {1676, 16384, 65, true}};
static constexpr Span k0_bf16_4_gemm_6[] = {{32, 943, 3, false}, {944, 11585, 65, true}, {11586, 16384, 3, false}};
static constexpr Row k0_bf16_4_gemm[] = {{128, 181, k0_bf16_4_gemm_0, 1}, {182, 362, k0_bf16_4_gemm_1, 1}, {363, 724, k0_bf16_4_gemm_2, 2}, {725, 1448, k0_bf16_4_gemm_3, 2}, {1449, 2896, k0_bf16_4_gemm_4, 2}, {2897, 5792, k0_bf16_4_gemm_5, 2}, {5793, 8192, k0_bf16_4_gemm_6, 3}};
static constexpr Span k0_bf16_6_gemm_0[] = {{32, 16384, 3, false}};
static constexpr Span k0_bf16_6_gemm_1[] = {{32, 16384, 3, false}};
static constexpr Span k0_bf16_6_gemm_2[] = {{32, 7074, 3, false}, {7075, 11925, 65, true}, {11926, 16384, 3, false}};
static constexpr Span k0_bf16_6_gemm_3[] = {{32, 2843, 3, false}, {2844, 16384, 65, true}};
static constexpr Span k0_bf16_6_gemm_4[] = {{32, 3804, 3, false}, {3805, 16384, 65, true}};
static constexpr Span k0_bf16_6_gemm_5[] = {{32, 1914, 3, false}, {1915, 11585, 65, true}, {11586, 16384, 3, false}};
static constexpr Span k0_bf16_6_gemm_6[] = {{32, 1448, 3, false}, {1449, 5792, 65, true}, {5793, 16384, 3, false}};
static constexpr Row k0_bf16_6_gemm[] = {{128, 181, k0_bf16_6_gemm_0, 1}, {182, 362, k0_bf16_6_gemm_1, 1}, {363, 724, k0_bf16_6_gemm_2, 3}, {725, 1448, k0_bf16_6_gemm_3, 2}, {1449, 2896, k0_bf16_6_gemm_4, 2}, {2897, 5792, k0_bf16_6_gemm_5, 3}, {5793, 8192, k0_bf16_6_gemm_6, 3}};
static constexpr Span k0_bf16_68_gemm_0[] = {{32, 16384, 3, false}};
static constexpr Span k0_bf16_68_gemm_1[] = {{32, 16384, 3, false}};
static constexpr Span k0_bf16_68_gemm_2[] = {{32, 8671, 3, false}, {8672, 16384, 65, true}};
static constexpr Span k0_bf16_68_gemm_3[] = {{32, 5153, 3, false}, {5154, 16384, 65, true}};
static constexpr Span k0_bf16_68_gemm_4[] = {{32, 3240, 3, false}, {3241, 16384, 65, true}};
static constexpr Span k0_bf16_68_gemm_5[] = {{32, 1696, 3, false}, {1697, 16384, 65, true}};
static constexpr Span k0_bf16_68_gemm_6[] = {{32, 1448, 3, false}, {1449, 11585, 65, true}, {11586, 16384, 3, false}};
static constexpr Row k0_bf16_68_gemm[] = {{128, 181, k0_bf16_68_gemm_0, 1}, {182, 362, k0_bf16_68_gemm_1, 1}, {363, 724, k0_bf16_68_gemm_2, 2}, {725, 1448, k0_bf16_68_gemm_3, 2}, {1449, 2896, k0_bf16_68_gemm_4, 2}, {2897, 5792, k0_bf16_68_gemm_5, 2}, {5793, 8192, k0_bf16_68_gemm_6, 3}};
static constexpr Span k0_bf16_70_gemm_0[] = {{32, 16384, 3, false}};
static constexpr Span k0_bf16_70_gemm_1[] = {{32, 16384, 3, false}};
static constexpr Span k0_bf16_70_gemm_2[] = {{32, 16384, 3, false}};
static constexpr Span k0_bf16_70_gemm_3[] = {{32, 4495, 3, false}, {4496, 16384, 65, true}};
static constexpr Span k0_bf16_70_gemm_4[] = {{32, 3760, 3, false}, {3761, 16384, 65, true}};
static constexpr Span k0_bf16_70_gemm_5[] = {{32, 1866, 3, false}, {1867, 11585, 65, true}, {11586, 16384, 3, false}};
static constexpr Span k0_bf16_70_gemm_6[] = {{32, 1448, 3, false}, {1449, 5792, 65, true}, {5793, 16384, 3, false}};
static constexpr Row k0_bf16_70_gemm[] = {{128, 181, k0_bf16_70_gemm_0, 1}, {182, 362, k0_bf16_70_gemm_1, 1}, {363, 724, k0_bf16_70_gemm_2, 1}, {725, 1448, k0_bf16_70_gemm_3, 2}, {1449, 2896, k0_bf16_70_gemm_4, 2}, {2897, 5792, k0_bf16_70_gemm_5, 3}, {5793, 8192, k0_bf16_70_gemm_6, 3}};
static constexpr Model k0_seed_0[] = {{0, false, 17586164470ULL, 4232ULL, 539741ULL}, {4, false, 1732099804ULL, 2985ULL, 0ULL}, {5, false, 2649790425ULL, 2833ULL, 0ULL}};
static constexpr Model k0_seed_1[] = {{0, false, 8168644255ULL, 4725ULL, 1466832ULL}, {4, true, 2464460317ULL, 3423ULL, 484443ULL}, {5, true, 3153352879ULL, 3101ULL, 1751575ULL}, {4, false, 2582142857ULL, 4124ULL, 221133ULL}, {5, false, 3612596387ULL, 3799ULL, 285195ULL}};
static constexpr Model k0_seed_4[] = {{0, false, 8401252826ULL, 4652ULL, 1457738ULL}, {4, true, 2607164943ULL, 3341ULL, 558251ULL}, {5, true, 3283388235ULL, 3097ULL, 1958377ULL}, {4, false, 2790666667ULL, 4039ULL, 242154ULL}, {5, false, 3834597820ULL, 3696ULL, 294446ULL}};
static constexpr Model k0_seed_5[] = {{0, false, 8736824962ULL, 5234ULL, 1299151ULL}, {4, true, 2904719577ULL, 3934ULL, 932454ULL}, {5, true, 3567510130ULL, 3375ULL, 2931931ULL}, {4, false, 3021722667ULL, 4509ULL, 145237ULL}, {5, false, 4039814059ULL, 4113ULL, 406599ULL}};
static constexpr Model k0_seed_6[] = {{0, false, 8366057569ULL, 4863ULL, 1423267ULL}, {4, true, 2619802814ULL, 3548ULL, 516262ULL}, {5, true, 3334451613ULL, 3204ULL, 1928070ULL}, {4, false, 2785933333ULL, 4231ULL, 190814ULL}, {5, false, 3826820545ULL, 3964ULL, 176510ULL}};
static constexpr Model k0_seed_7[] = {{0, false, 8734254453ULL, 5284ULL, 1292484ULL}, {4, true, 2892859935ULL, 3959ULL, 1126445ULL}, {5, true, 3593043137ULL, 3466ULL, 3087317ULL}, {4, false, 3060682982ULL, 4579ULL, 100279ULL}, {5, false, 4049014207ULL, 4152ULL, 342264ULL}};
static constexpr Model k0_seed_68[] = {{0, false, 8569556764ULL, 4751ULL, 1429582ULL}, {4, true, 2569846056ULL, 3455ULL, 750121ULL}, {5, true, 3351068189ULL, 3288ULL, 2381789ULL}, {4, false, 2818011765ULL, 4213ULL, 182744ULL}, {5, false, 3835638584ULL, 3716ULL, 230957ULL}};
static constexpr Model k0_seed_70[] = {{0, false, 8554571205ULL, 4954ULL, 1391574ULL}, {4, true, 2591624199ULL, 3605ULL, 710735ULL}, {5, true, 3334075318ULL, 3351ULL, 2477994ULL}, {4, false, 2813057692ULL, 4349ULL, 147273ULL}, {5, false, 3843992980ULL, 3982ULL, 48540ULL}};
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
    {90, "nvlink", 2, "533403020d105a21125c1433976f6912a83d1efa64ab6fb7e56a55a60ed78a04", 512LL, 16777216LL,
     {{{{k0_bf16_0, 7}, {k0_bf16_1, 7}, {k0_bf16_4, 7}, {k0_bf16_5, 7}, {k0_bf16_6, 7}, {k0_bf16_7, 7}, {k0_bf16_68, 7}, {k0_bf16_70, 7}}, {{k0_bf16_0, 7}, {k0_bf16_1, 7}, {k0_bf16_4, 7}, {k0_bf16_5, 7}, {k0_bf16_6, 7}, {k0_bf16_7, 7}, {k0_bf16_68, 7}, {k0_bf16_70, 7}}, {{nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}}},
      {{{nullptr, 0}, {k0_bf16_1_sharded, 7}, {k0_bf16_4_sharded, 7}, {nullptr, 0}, {k0_bf16_6_sharded, 7}, {nullptr, 0}, {k0_bf16_68_sharded, 7}, {k0_bf16_70_sharded, 7}}, {{nullptr, 0}, {k0_bf16_1_sharded, 7}, {k0_bf16_4_sharded, 7}, {nullptr, 0}, {k0_bf16_6_sharded, 7}, {nullptr, 0}, {k0_bf16_68_sharded, 7}, {k0_bf16_70_sharded, 7}}, {{nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}}},
      {{{nullptr, 0}, {k0_bf16_1_gemm, 7}, {k0_bf16_4_gemm, 7}, {nullptr, 0}, {k0_bf16_6_gemm, 7}, {nullptr, 0}, {k0_bf16_68_gemm, 7}, {k0_bf16_70_gemm, 7}}, {{nullptr, 0}, {k0_bf16_1_gemm, 7}, {k0_bf16_4_gemm, 7}, {nullptr, 0}, {k0_bf16_6_gemm, 7}, {nullptr, 0}, {k0_bf16_68_gemm, 7}, {k0_bf16_70_gemm, 7}}, {{nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}, {nullptr, 0}}}},
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
