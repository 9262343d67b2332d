// The CUDA kernels as functions of this machine: their thread blocks and threads one after the other. None of them waits
// for another thread, so that the order makes no difference.

#include <cmath>

struct alignas(16) uint4 {
    unsigned int x, y, z, w;
};
struct Index {
    unsigned int x = 0, y = 0;
};
static thread_local Index threadIdx, blockIdx, blockDim, gridDim;

#define __global__
#define __device__
#define __launch_bounds__(threads)
#define __grid_constant__

static unsigned int __funnelshift_r(unsigned int low, unsigned int high, unsigned int shift)
{
    return (unsigned int)((((unsigned long long)high << 32) | low) >> (shift & 31));
}

template <typename T> static T atomicAdd(T *at, T more)
{
    const T before = *at;
    *at += more;
    return before;
}

#include "kernels.cu"

template <typename Kernel> static void run(const unsigned int *grid, unsigned int threads, Kernel kernel)
{
    gridDim.x = grid[0], gridDim.y = grid[1], blockDim.x = threads;
    for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y)
        for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
            for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x)
                kernel();
}

// As a GPU's driver launches them: `arguments` are pointers to each one.
#define AS(type, number) (*(type *)arguments[number])

extern "C" void launch_arithmetic(const unsigned int *grid, unsigned int threads, void **arguments)
{
    run(grid, threads, [&] { arithmetic(AS(u64, 0), AS(float, 1), AS(float, 2), AS(float *, 3)); });
}

extern "C" void launch_read_memory(const unsigned int *grid, unsigned int threads, void **arguments)
{
    run(grid, threads, [&] { read_memory(AS(const uint4 *, 0), AS(u64, 1), AS(u32 *, 2)); });
}

extern "C" void launch_copy_runs(const unsigned int *grid, unsigned int threads, void **arguments)
{
    run(grid, threads, [&] { copy_runs(AS(const Runs, 0)); });
}

extern "C" void launch_compare_runs(const unsigned int *grid, unsigned int threads, void **arguments)
{
    run(grid, threads, [&] { compare_runs(AS(const Runs, 0), AS(u64 *, 1)); });
}
