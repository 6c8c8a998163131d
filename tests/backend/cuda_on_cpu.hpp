// Enough of CUDA to run a kernel's C++ on a CPU, block by block: a thread is a coroutine that gives way at barriers.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <ucontext.h>
#include <vector>

#define __device__
#define __global__
#define __launch_bounds__(...)
#define __forceinline__ inline
#define __restrict__
#define SHARED(type, name) type* name = (type*)emulated::memory

struct Index { int x, y; };
static Index threadIdx, blockIdx, gridDim;

namespace emulated {
struct Thread { ucontext_t context; std::vector<char> stack; bool ended; int products; };
static std::vector<Thread> threads;
static ucontext_t scheduler;
static int current, arrived, generation;
static void* memory;
static std::function<void()> body;
struct Factors { uint32_t a[4], b[2]; };
static std::vector<Factors> factors[2];  // of every lane, for this product and the one before

static void give_way() { swapcontext(&threads[current].context, &scheduler); }
static void begin() { body(); threads[current].ended = true; give_way(); }

static void launch(int gx, int gy, int number, long bytes, std::function<void()> what) {
    body = what;
    gridDim = {gx, gy};
    for (int y = 0; y < gy; y++) for (int x = 0; x < gx; x++) {
        std::vector<uint32_t> shared(bytes / 4 + 1, 0x7fc07fc0u);  // what nobody wrote is NaN
        memory = shared.data();
        blockIdx = {x, y};
        arrived = generation = 0;
        threads.assign(number, Thread());
        for (auto& f : factors) f.assign(number, Factors());
        for (auto& thread : threads) {
            thread.stack.resize(1 << 16);
            getcontext(&thread.context);
            thread.context.uc_stack.ss_sp = thread.stack.data();
            thread.context.uc_stack.ss_size = thread.stack.size();
            thread.context.uc_link = nullptr;
            makecontext(&thread.context, begin, 0);
        }
        // Forwards and backwards in turn, so that what lacks a barrier is seen one way or the other.
        bool some = true;
        for (int turn = 0; some; turn++) {
            some = false;
            for (int i = 0; i < number; i++) {
                current = turn % 2 ? number - 1 - i : i;
                if (threads[current].ended) continue;
                some = true;
                threadIdx = {current, 0};
                swapcontext(&scheduler, &threads[current].context);
            }
        }
    }
}

static float number(uint32_t half) { uint32_t bits = half << 16; float f; std::memcpy(&f, &bits, 4); return f; }
static uint32_t rounded(float f) {
    uint32_t bits; std::memcpy(&bits, &f, 4);
    if (f != f) return 0x7fc0;
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
static float tf32(uint32_t bits) { bits &= 0xffffe000u; float f; std::memcpy(&f, &bits, 4); return f; }
// The product of two words.
static float product(uint32_t a, uint32_t b) {
    if (!BF16) return tf32(a) * tf32(b);
    return number(a & 0xffff) * number(b & 0xffff) + number(a >> 16) * number(b >> 16);
}
}  // namespace emulated

static void sync_threads() {
    using namespace emulated;
    int mine = generation;
    if (++arrived == (int)threads.size()) { arrived = 0; generation++; }
    while (generation == mine) give_way();
}

static unsigned pack(float low, float high) {
    if (BF16) return emulated::rounded(low) | emulated::rounded(high) << 16;
    uint32_t bits; std::memcpy(&bits, &low, 4);
    return low != low ? 0x7fffffff & ~0x1fffu : (bits + 0x1000) & ~0x1fffu;
}
static float widened(float number) { return number; }
static float widened(uint16_t bits) { return emulated::number(bits); }
static void load4(float v[4], const float* from) {
    if ((uintptr_t)from % 16) std::abort();
    std::memcpy(v, from, 16);
}
static void load4(float v[4], const uint16_t* from) {
    if ((uintptr_t)from % 8) std::abort();
    for (int k = 0; k < 4; k++) v[k] = widened(from[k]);
}

static void store2(float* to, float first, float second) {
    if ((uintptr_t)to % 8) std::abort();
    to[0] = first, to[1] = second;
}
static void store2(uint16_t* to, float first, float second) {
    if ((uintptr_t)to % 4) std::abort();
    const unsigned both = pack(first, second);
    to[0] = both & 0xffff, to[1] = both >> 16;
}

static void mma(float c[4], const unsigned a[4], const unsigned b[2]) {
    using namespace emulated;
    int me = current, lane = me % 32, first = me - lane, g = lane / 4, t = lane % 4;
    const int mine = threads[me].products;
    auto& now = factors[mine % 2];
    std::memcpy(now[me].a, a, 16);
    std::memcpy(now[me].b, b, 8);
    threads[me].products++;
    for (int other = first; other < first + 32; other++)
        while (threads[other].products <= mine) give_way();
    for (int e = 0; e < 4; e++) {
        int row = g + e / 2 * 8, column = 2 * t + e % 2;
        for (int k = 0; k < 8; k++) {
            int holder = k % 4, high = k / 4;
            c[e] += product(now[first + row % 8 * 4 + holder].a[row / 8 + 2 * high], now[first + column * 4 + holder].b[high]);
        }
    }
}
