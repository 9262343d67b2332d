// The kernels of the CUDA device: arithmetic that fills what is left of a prefill, the streaming read of a decode, and
// copies between KV blocks and one piece of memory. NVRTC compiles them; they include nothing.

typedef unsigned long long u64;
typedef unsigned char u8;
typedef unsigned int u32;

#define THREADS 512
#define PIECE 16 // bytes that a thread moves at a time
#define MAX_RUNS 128

// One thread of the whole grid's first dimension, and how many there are.
static __device__ u64 rank() { return (u64)blockIdx.x * blockDim.x + threadIdx.x; }
static __device__ u64 width() { return (u64)gridDim.x * blockDim.x; }

// `iterations` of 64 fused multiply-adds in four chains. With a, b >= 0 nothing is stored, which the compiler cannot know.
extern "C" __global__ void __launch_bounds__(THREADS) arithmetic(u64 iterations, float a, float b, float *never)
{
    float x = threadIdx.x, y = x + 1, z = x + 2, w = x + 3; // all different, so that none of them is left out
#pragma unroll 1
    for (u64 i = 0; i < iterations; ++i) {
#pragma unroll
        for (int unrolled = 0; unrolled < 16; ++unrolled) {
            x = fmaf(x, a, b);
            y = fmaf(y, a, b);
            z = fmaf(z, a, b);
            w = fmaf(w, a, b);
        }
    }
    const float sum = x + y + z + w;
    if (sum < 0.0f)
        *never = sum;
}

// Reads `pieces` of 16 bytes from `from` on, each once. What it reads are zeros, which the compiler cannot know.
extern "C" __global__ void __launch_bounds__(THREADS) read_memory(const uint4 *__restrict__ from, u64 pieces, u32 *never)
{
    const u64 stride = width();
    u64 i = rank();
    u32 sum = 0;
    for (; i + 3 * stride < pieces; i += 4 * stride) {
        const uint4 a = from[i], b = from[i + stride], c = from[i + 2 * stride], d = from[i + 3 * stride];
        sum += a.x + a.y + a.z + a.w + b.x + b.y + b.z + b.w + c.x + c.y + c.z + c.w + d.x + d.y + d.z + d.w;
    }
    for (; i < pieces; i += stride) {
        const uint4 a = from[i];
        sum += a.x + a.y + a.z + a.w;
    }
    if (sum)
        atomicAdd(never, sum);
}

// `nbytes` that lie together at `from` and at `to`, both addresses in device memory, or in host memory that is mapped.
struct Run {
    u64 from, to, nbytes;
};
struct Runs {
    Run run[MAX_RUNS];
};

// 16 bytes from any address. Nothing is read beyond the aligned 16 bytes in which the last of them lies.
static __device__ uint4 load(u64 from)
{
    if (from % PIECE == 0)
        return *(const uint4 *)from;
    const u32 *words = (const u32 *)(from & ~(u64)3);
    const u32 shift = (u32)(from & 3) * 8;
    const u32 a = words[0], b = words[1], c = words[2], d = words[3], e = words[4];
    uint4 piece;
    piece.x = __funnelshift_r(a, b, shift);
    piece.y = __funnelshift_r(b, c, shift);
    piece.z = __funnelshift_r(c, d, shift);
    piece.w = __funnelshift_r(d, e, shift);
    return piece;
}

struct Copy {
    __device__ void piece(u64 from, u64 to) const { *(uint4 *)to = load(from); }
    __device__ void byte(u64 from, u64 to) const { *(u8 *)to = *(const u8 *)from; }
};

struct Compare {
    u64 *different;
    __device__ void piece(u64 from, u64 to) const
    {
        const uint4 a = load(from), b = *(const uint4 *)to;
        if (a.x != b.x || a.y != b.y || a.z != b.z || a.w != b.w)
            atomicAdd(different, (u64)1);
    }
    __device__ void byte(u64 from, u64 to) const
    {
        if (*(const u8 *)from != *(const u8 *)to)
            atomicAdd(different, (u64)1);
    }
};

// Whole aligned pieces of where a run goes to, and the bytes before and behind them one by one.
template <typename Do> static __device__ void over(const Run &run, const Do &each)
{
    const u64 stride = width(), from = run.from, to = run.to;
    const u64 before = (PIECE - to % PIECE) % PIECE;
    const u64 head = before < run.nbytes ? before : run.nbytes;
    const u64 pieces = (run.nbytes - head) / PIECE, ends = run.nbytes - pieces * PIECE;
    for (u64 i = rank(); i < pieces; i += stride)
        each.piece(from + head + i * PIECE, to + head + i * PIECE);
    for (u64 i = rank(); i < ends; i += stride) {
        const u64 at = i < head ? i : i + pieces * PIECE;
        each.byte(from + at, to + at);
    }
}

// A row of thread blocks for each run.
extern "C" __global__ void __launch_bounds__(THREADS) copy_runs(const __grid_constant__ Runs runs)
{
    over(runs.run[blockIdx.y], Copy());
}

// Counts the pieces (and bytes at the ends) in which the two memories differ.
extern "C" __global__ void __launch_bounds__(THREADS) compare_runs(const __grid_constant__ Runs runs, u64 *different)
{
    Compare compare;
    compare.different = different;
    over(runs.run[blockIdx.y], compare);
}
