// One kernel: accumulator [n, k] FP32 += a b^T, both operands E4M3 in 1x128 groups along tokens. `grad_weight.py` says why.
//
// A program an SM walks tiles of 256 x 128. One warp brings the operands of one group of 128 tokens after the other into a ring
// of shared memory; two warpgroups own 128 rows each. For each group g, in order, and each element:
//
//     total = fma(a_scale[n, g] * b_scale[k, g], sum over the group's tokens of a[n, t] b[k, t], total)
//
// The tensor cores are to be busy while scales are applied. Left alone, both warpgroups multiply at once and then scale at once. So
// they take turns: one starts a product of 64 x 128 only when three quarters of the other's last one are done, and scales
// while the other multiplies. A thread keeps 32 scales of b over its two products, since reading shared memory is scarce too.

typedef unsigned int u32;
typedef unsigned long long u64;

struct __align__(64) TensorMap { u64 words[16]; };

constexpr int ROWS = 256, COLS = 128, GROUP = 128, STAGES = 4;  // grad_weight.py knows these
constexpr int CONSUMERS = 256;                                  // threads of the two warpgroups; a third loads
constexpr int A_BYTES = ROWS * GROUP, A_SCALE_BYTES = ROWS * 4;
constexpr int STAGE_BYTES = (ROWS + COLS) * GROUP, SCALE_BYTES = (ROWS + COLS) * 4;
constexpr int TOGETHER = 8;  // row blocks that walk the columns together, so that their operands stay in the L2 cache

// ---- instructions ----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@!done bra AGAIN;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// A box of a tensor in global memory, by TMA; what lies outside the tensor arrives as zeros.
__device__ __forceinline__ void load_box(u32 to, const TensorMap* map, u32 barrier, int inner, int outer) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(inner), "r"(outer)
      : "memory");
}

__device__ __forceinline__ float load_float(u32 address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address));
  return x;
}

__device__ __forceinline__ float2 load_pair(u32 address) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address));
  return x;
}

__device__ __forceinline__ void add_pair(float* to, float x, float y) {
  asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x), "f"(y) : "memory");
}

// The two warpgroups' turns are the named barriers 1 and 2.
__device__ __forceinline__ void wait_turn(int warpgroup) { asm volatile("bar.sync %0, 256;" ::"r"(1 + warpgroup) : "memory"); }
__device__ __forceinline__ void pass_turn(int warpgroup) { asm volatile("bar.arrive %0, 256;" ::"r"(2 - warpgroup) : "memory"); }

// What wgmma reads: rows of 128 bytes in the 128-byte swizzle, eight of them 1024 bytes. Adding 1 moves it by 16 bytes.
__device__ __forceinline__ u64 descriptor(u32 address) {
  return (u64)((address & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

#define FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SIXTEEN(i) FOUR(i), FOUR(i + 4), FOUR(i + 8), FOUR(i + 12)

// d [64, 128] of a warpgroup = a [64, 32] b [128, 32]^T, plus d where `add`. Thread t of a warp holds of rows t / 4 (d[4 i], d[4 i + 1])
// and t / 4 + 8 (d[4 i + 2], d[4 i + 3]) the columns 8 i + 2 (t % 4) and the next.
__device__ __forceinline__ void multiply(float (&d)[64], u64 a, u64 b, int add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, add, 1, 1;\n}"
      : SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), SIXTEEN(48)
      : "l"(a), "l"(b), "r"(add));
}

// Tells the compiler that d may change here: wgmma writes it behind its back.
__device__ __forceinline__ void touch(float (&d)[64]) {
#pragma unroll
  for (int i = 0; i < 64; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// ---- steps -----------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void tile_of(int tile, int row_blocks, int column_blocks, int& row, int& column) {
  const int width = TOGETHER * column_blocks, first = tile / width * TOGETHER, height = min(row_blocks - first, TOGETHER);
  row = (first + tile % width % height) * ROWS;
  column = tile % width / height * COLS;
}

// d = a [64, 128] b [128, 128]^T of one group, in the warpgroup's turn, which it passes on before the end.
__device__ __forceinline__ void product(float (&d)[64], u64 a, u64 b, int warpgroup) {
  wait_turn(warpgroup);
  touch(d);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int step = 0; step < GROUP / 32; ++step) {
    multiply(d, a + 2 * step, b + 2 * step, step > 0);
    if (step >= 2) asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  }
  asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
  pass_turn(warpgroup);
  touch(d);
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  touch(d);
}

// The scales that a thread needs of one group: of its rows in both products, and of its columns.
struct Scales {
  float upper[2], lower[2];
  float2 column[16];
};

// row_scales and column_scales: addresses of the thread's first.
__device__ __forceinline__ void load_scales(Scales& s, u32 row_scales, u32 column_scales) {
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    s.upper[part] = load_float(row_scales + 256 * part);
    s.lower[part] = load_float(row_scales + 256 * part + 32);
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) s.column[i] = load_pair(column_scales + 32 * i);
}

// total += d, each element with the scales of its row and its column.
__device__ __forceinline__ void scale_and_add(float (&total)[64], const float (&d)[64], const Scales& s, int part) {
  const float upper = s.upper[part], lower = s.lower[part];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    total[4 * i] = fmaf(upper * s.column[i].x, d[4 * i], total[4 * i]);
    total[4 * i + 1] = fmaf(upper * s.column[i].y, d[4 * i + 1], total[4 * i + 1]);
    total[4 * i + 2] = fmaf(lower * s.column[i].x, d[4 * i + 2], total[4 * i + 2]);
    total[4 * i + 3] = fmaf(lower * s.column[i].y, d[4 * i + 3], total[4 * i + 3]);
  }
}

// Adds to memory, once an element and by one thread, so that the result does not depend on timing.
__device__ __forceinline__ void add_to_memory(float* accumulator, const float (&total)[64], int row, int column, int n, int k) {
#pragma unroll
  for (int lower = 0; lower < 2; ++lower) {
    float* to = accumulator + (long long)(row + 8 * lower) * k + column;
#pragma unroll
    for (int i = 0; i < 16; ++i)
      if (row + 8 * lower < n && column + 8 * i < k) add_pair(to + 8 * i, total[4 * i + 2 * lower], total[4 * i + 2 * lower + 1]);
  }
}

// ---- the kernel ------------------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(CONSUMERS + 128, 1) grad_weight(
    const __grid_constant__ TensorMap a_map,         // E4M3 [n, 128 groups], boxes of ROWS x 128
    const __grid_constant__ TensorMap b_map,         // E4M3 [k, 128 groups], boxes of COLS x 128
    const __grid_constant__ TensorMap a_scales_map,  // FP32 [groups, n], boxes of 1 x ROWS
    const __grid_constant__ TensorMap b_scales_map,  // FP32 [groups, k], boxes of 1 x COLS
    float* __restrict__ accumulator,                 // FP32 [n, k] contiguous, added to; k even
    int n, int k, int groups) {
  // STAGES of a [ROWS, 128] and b [COLS, 128] in bytes, STAGES of their scales, barriers `full` and `empty` of each stage
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 operands = (u32)__cvta_generic_to_shared(memory), scales = operands + STAGES * STAGE_BYTES;
  const u32 full = scales + STAGES * SCALE_BYTES, empty = full + 8 * STAGES;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;  // the shuffle tells the compiler: uniform
  const int row_blocks = (n + ROWS - 1) / ROWS, column_blocks = (k + COLS - 1) / COLS, tiles = row_blocks * column_blocks;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) barrier_init(full + 8 * s, 1), barrier_init(empty + 8 * s, CONSUMERS / 32);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  u32 phases = 0;  // one bit a stage; each tile starts at stage 0

  if (warp >= CONSUMERS / 32) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x != CONSUMERS) return;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      int row, column;
      tile_of(tile, row_blocks, column_blocks, row, column);
      for (int group = 0; group < groups; ++group) {
        const u32 stage = group % STAGES, barrier = full + 8 * stage;
        const u32 a = operands + stage * STAGE_BYTES, a_scales = scales + stage * SCALE_BYTES;
        barrier_wait(empty + 8 * stage, (~phases >> stage) & 1);
        phases ^= 1 << stage;
        barrier_expect(barrier, STAGE_BYTES + SCALE_BYTES);
        load_box(a, &a_map, barrier, group * GROUP, row);
        load_box(a + A_BYTES, &b_map, barrier, group * GROUP, column);
        load_box(a_scales, &a_scales_map, barrier, row, group);
        load_box(a_scales + A_SCALE_BYTES, &b_scales_map, barrier, column, group);
      }
    }
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
  const int warpgroup = warp / 4, my_row = warpgroup * 128 + warp % 4 * 16 + lane / 4, my_column = lane % 4 * 2;
  const u32 a_scales = scales + 4 * my_row, b_scales = scales + A_SCALE_BYTES + 4 * my_column;
  const u64 a = descriptor(operands + warpgroup * 128 * GROUP), b = descriptor(operands + A_BYTES);
  if (warpgroup == 1) pass_turn(1);
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    float total[2][64], d[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) total[0][i] = total[1][i] = 0.f;
#pragma unroll 1
    for (int first = 0; first < groups; first += STAGES) {
#pragma unroll
      for (int stage = 0; stage < STAGES; ++stage) {  // unrolled: stages' addresses are then constants
        if (first + stage >= groups) break;
        barrier_wait(full + 8 * stage, (phases >> stage) & 1);
        phases ^= 1 << stage;
        Scales s;  // loaded ahead of the turn, which is for the tensor cores
        load_scales(s, a_scales + stage * SCALE_BYTES, b_scales + stage * SCALE_BYTES);
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          product(d, a + (stage * STAGE_BYTES + part * 64 * GROUP) / 16, b + stage * STAGE_BYTES / 16, warpgroup);
          if (part == 1 && lane == 0) barrier_arrive(empty + 8 * stage);
          scale_and_add(total[part], d, s, part);
        }
      }
    }
    int row, column;
    tile_of(tile, row_blocks, column_blocks, row, column);
#pragma unroll
    for (int part = 0; part < 2; ++part)
      add_to_memory(accumulator, total[part], row + my_row + 64 * part, column + my_column, n, k);
  }
}
