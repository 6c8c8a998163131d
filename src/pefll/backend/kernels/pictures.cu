// Convolutions with a client axis in bfloat16 or TF32. A block copies a few pictures of one client to shared memory.
//
// The Triton kernels (convolution.py, conv_backward_bf16.py) load every window from the L2 cache. So they load a pixel
// about ten times. They also write the routed gradients of every position. Here a picture is loaded once, and rounded
// while it is copied. A window is an address in shared memory. The layouts below put the 32 addresses of a warp into
// different banks. pictures.py gives the constants in capitals to the compiler.
//
// `mma` multiplies 16 x 8 by 8 x 8 words, with a warp on tensor cores. Lane 4 g + t has these elements:
//   first factor:  rows g and g + 8, columns t and t + 4
//   second factor: column g, rows t and t + 4
//   result:        rows g and g + 8, columns 2t and 2t + 1

typedef unsigned int word;  // one TF32, or two bfloat16; `mma` adds the products of the two
constexpr int PER = BF16 ? 2 : 1;  // numbers in a word
typedef unsigned char byte;
#if HALVES
typedef unsigned short activation;  // an output or its gradient: the bits of a bfloat16, for a following convolution
#else
typedef float activation;
#endif
static_assert(!HALVES || BF16, "bfloat16 outputs need bfloat16 products");

struct Four { float v[4]; };

// Copy N items to shared memory. Each thread loads AT_ONCE items before it stores them, so that the loads overlap.
template <int N, int THREADS, int AT_ONCE, class Fetch, class Put>
__device__ __forceinline__ void stage(int thread, Fetch fetch, Put put) {
    for (int first = thread; first < N; first += THREADS * AT_ONCE) {
        decltype(fetch(0)) held[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (first + i * THREADS < N) held[i] = fetch(first + i * THREADS);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (first + i * THREADS < N) put(first + i * THREADS, held[i]);
    }
}

// Return the values of four channels. Only the first `there` channels exist; the other values are 0.
template <class Number>
__device__ __forceinline__ Four four(const Number* __restrict__ from, int apart, int there, bool in_one) {
    Four all = {0.f, 0.f, 0.f, 0.f};
    if (in_one) {
        load4(all.v, from);
    } else {
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (k < there) all.v[k] = widened(from[k * apart]);
    }
    return all;
}

// Return the routes of four channels, a byte each. Only the first `there` channels exist; the other routes are 255.
__device__ __forceinline__ word ways(const byte* __restrict__ from, int there, bool in_one) {
    if (in_one) return *(const word*)from;
    word all = 0xffffffffu;
#pragma unroll
    for (int k = 0; k < 4; k++)
        if (k < there) all = (all & ~(0xffu << 8 * k)) | (word)from[k] << 8 * k;
    return all;
}

#if defined(CONVOLVE)
// ---- Forward pass: convolution, pooling and ReLU.
//
// Rows of a product are outputs. With 2 x 2 pooling one thread has the four positions of a cell. Columns are output
// channels. The sum runs over *chunks* of four words. If a pixel has a multiple of four words, a chunk is within one
// pixel. Else chunks run along a row of a window, where the words of neighbouring pixels are neighbours. The offsets of
// a chunk are compile-time constants.

constexpr int TAPS = KH * KW;
constexpr int WORDS = (CI + PER - 1) / PER;              // words for the channels of a pixel
constexpr bool WHOLE = WORDS % 4 == 0;                   // whether a pixel consists of whole chunks
// Words from one pixel to the next, chosen so that windows of neighbouring outputs start in different banks.
constexpr int PIXEL = WHOLE && POOL == 2 ? WORDS + 2 : WORDS;
constexpr int CHUNKS_X = (KW * WORDS + 3) / 4, CHUNKS = KH * CHUNKS_X;
constexpr int STEPS = (CHUNKS + 1) / 2;                  // number of products, each of two chunks
constexpr int TAP = WORDS | 1;                           // words from one tap of a filter to the next, if WHOLE
constexpr int FILTER = ((WHOLE ? TAPS * TAP + 4 : STEPS * 8) + 3) / 8 * 8 + 4;  // words of a filter
constexpr int TILES = (CO + 7) / 8;                      // tiles of output channels
constexpr bool PADDED = !WHOLE || CHUNKS % 2 || CO % 8;  // whether filters have words that must be set to 0
constexpr int PICTURE = HP * WP * PIXEL;                 // words of a picture
constexpr int CELLS = PICTURES * PH * PW;                // outputs of a block
constexpr int GROUP = POOL == 2 ? MT * 4 : MT * 16;      // outputs that a warp computes at once
constexpr int THREADS = WARPS * 32;
constexpr bool HELD = STEPS * TILES <= 20;               // whether a thread keeps its part of the filters in registers

__device__ constexpr int in_window(int chunk) {
    return chunk >= CHUNKS ? 0
        : chunk / CHUNKS_X * WP * PIXEL
            + (WHOLE ? chunk % CHUNKS_X * 4 / WORDS * PIXEL + chunk % CHUNKS_X * 4 % WORDS : chunk % CHUNKS_X * 4);
}

__device__ constexpr int in_filter(int chunk) {
    return !WHOLE ? chunk * 4 : chunk * 4 / WORDS * TAP + chunk * 4 % WORDS;
}

struct Two { float low, high; };
static_assert(!HALVES || (CO % 2 == 0 && !CHANNELS_FIRST), "bfloat16 outputs are written in pairs of channels");

extern "C" __global__ void __launch_bounds__(THREADS) convolve(
    const float* __restrict__ x, const float* __restrict__ w, const float* __restrict__ bias,
    activation* __restrict__ y, byte* __restrict__ route, int samples,
    long long sx_c, long long sx_b, int sx_h, int sx_w, int sx_k, long long sw_c, long long sb_c
) {
    SHARED(word, shared);
    word* filters = shared;                        // [TILES * 8][FILTER]
    word* pictures = shared + TILES * 8 * FILTER;  // [PICTURES][HP][WP][PIXEL], and 4 more words
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, g = lane / 4, t = lane % 4;
    const long long client = blockIdx.y;
    const int first = blockIdx.x * PICTURES;
    x += client * sx_c;
    w += client * sw_c;

    if (thread < 4) pictures[PICTURES * PICTURE + thread] = 0;
    if (PADDED) {
        for (int i = thread; i < TILES * 8 * FILTER; i += THREADS) filters[i] = 0;
        sync_threads();
    }
    stage<CO * WORDS * TAPS, THREADS, 8>(thread,
        [&](int i) {
            const int tap = i % TAPS, in = i / TAPS % WORDS * PER, out = i / (TAPS * WORDS);
            const int at = (out * CI + in) * TAPS + tap;
            Two both = {w[at], 0.f};
            if (PER == 2 && in + 1 < CI) both.high = w[at + TAPS];
            return both;
        },
        [&](int i, Two both) {
            const int tap = i % TAPS, in = i / TAPS % WORDS, out = i / (TAPS * WORDS);
            const int at = WHOLE ? tap * TAP + in : tap / KW * CHUNKS_X * 4 + tap % KW * WORDS + in;
            filters[out * FILTER + at] = pack(both.low, both.high);
        });
    stage<PICTURES * HP * WP, THREADS, 8>(thread,
        [&](int pixel) {
            const int column = pixel % WP - PAD, row = pixel / WP % HP - PAD;
            const int b = first + (PICTURES == 1 ? 0 : pixel / (WP * HP));
            if (b >= samples || row < 0 || row >= IH || column < 0 || column >= IW) return Four{0.f, 0.f, 0.f, 0.f};
            return four(x + b * sx_b + row * sx_h + column * sx_w, sx_k, CI, VECTOR);
        },
        [&](int pixel, Four all) {
#pragma unroll
            for (int k = 0; k < 4; k += PER)
                if (k < CI) pictures[pixel * PIXEL + k / PER] = pack(all.v[k], all.v[k + PER - 1]);
        });
    float added[TILES][2];
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int channel = n * 8 + 2 * t + e;
            added[n][e] = HAS_BIAS && channel < CO ? bias[client * sb_c + channel] : 0.f;
        }
    sync_threads();

    const word* filter = filters + g * FILTER + t;
    word held[HELD ? STEPS : 1][TILES][2];
    if (HELD) {
#pragma unroll
        for (int step = 0; step < STEPS; step++)
#pragma unroll
            for (int n = 0; n < TILES; n++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    held[HELD ? step : 0][n][half] = filter[n * 8 * FILTER + in_filter(2 * step + half)];
    }
    for (int group = warp; group < (CELLS + GROUP - 1) / GROUP; group += WARPS) {
        const word* window[2 * MT];  // the windows of this thread's rows
#pragma unroll
        for (int r = 0; r < 2 * MT; r++) {
            int cell = group * GROUP + (POOL == 2 ? r / 4 : r) * 8 + g, place = POOL == 2 ? r % 4 : 0;
            if (cell >= CELLS) cell = 0;
            const int picture = PICTURES == 1 ? 0 : cell / (PH * PW), rest = cell - picture * (PH * PW);
            const int row = rest / PW * POOL + place / 2, column = rest % PW * POOL + place % 2;
            window[r] = pictures + picture * PICTURE + (row * WP + column) * PIXEL + t;
        }
        float total[MT][TILES][4] = {};
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const int low = in_window(2 * step), high = in_window(2 * step + 1);
            word a[MT][4];
#pragma unroll
            for (int m = 0; m < MT; m++) {
                a[m][0] = window[2 * m][low];
                a[m][1] = window[2 * m + 1][low];
                a[m][2] = window[2 * m][high];
                a[m][3] = window[2 * m + 1][high];
            }
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                word b[2];
#pragma unroll
                for (int half = 0; half < 2; half++)
                    b[half] = HELD ? held[HELD ? step : 0][n][half] : filter[n * 8 * FILTER + in_filter(2 * step + half)];
#pragma unroll
                for (int m = 0; m < MT; m++) mma(total[m][n], a[m], b);
            }
        }
        const long long out = (client * samples + first) * (PH * PW);
#pragma unroll
        for (int r = 0; r < (POOL == 2 ? MT / 2 : 2 * MT); r++) {
            const int cell = group * GROUP + r * 8 + g, picture = PICTURES == 1 ? 0 : cell / (PH * PW);
            if (cell >= CELLS || first + picture >= samples) continue;
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                const int channel = n * 8 + 2 * t;
                float value[2];
                int winner[2] = {0, 0};
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    value[e] = POOL == 2 ? total[2 * r % MT][n][e] : total[r / 2][n][r % 2 * 2 + e];
                    if (POOL == 2) {
#pragma unroll
                        for (int place = 1; place < 4; place++) {
                            const float other = total[(2 * r + place / 2) % MT][n][place % 2 * 2 + e];
                            if (other > value[e] || other != other) value[e] = other, winner[e] = place;  // NaN wins
                        }
                    }
                    value[e] += added[n][e];
                    if (RELU && value[e] <= 0.f) value[e] = 0.f, winner[e] = 255;
                }
                const long long at = (out + cell) * CO + channel;
                if (CHANNELS_FIRST) {
                    const long long here = out * CO + (picture * CO + channel) * (PH * PW) + cell - picture * (PH * PW);
                    if (channel < CO) y[here] = value[0];
                    if (channel + 1 < CO) y[here + PH * PW] = value[1];
                } else if (CO % 2 == 0) {
                    if (channel < CO) store2(y + at, value[0], value[1]);
                } else {
                    if (channel < CO) y[at] = value[0];
                    if (channel + 1 < CO) y[at + 1] = value[1];
                }
                if (!RELU && POOL == 1) continue;
                if (CO % 2 == 0) {
                    if (channel < CO) *(unsigned short*)(route + at) = (unsigned short)(winner[0] | winner[1] << 8);
                } else {
                    if (channel < CO) route[at] = (byte)winner[0];
                    if (channel + 1 < CO) route[at + 1] = (byte)winner[1];
                }
            }
        }
    }
}
#endif

#if defined(WEIGHTS)
// ---- Partial sums of the gradient of filters and bias.
//
// Rows of a product are output channels. Columns are the weights of one filter in memory order, and then the bias. The
// sum runs over words of positions: a word has one TF32 position or two neighbouring bfloat16 positions. With 2 x 2
// pooling, a *slot* is a cell, and each word of the cell is a *phase*. Without pooling, a slot is one word. In bfloat16
// a pair of pixels that starts at an odd column is read from a second copy of the picture, shifted left by one pixel.

constexpr int WINDOW = CI * KH * KW;
constexpr int COLUMNS = (WINDOW + 1 + 7) / 8;                 // tiles of columns
constexpr int TILES = (COLUMNS + WARPS_N - 1) / WARPS_N;      // tiles of columns of one warp
constexpr int FILLED = PER == 1 ? WP : POOL == 1 && PW % 2 ? WP / 2 + 1 : (WP + 1) / 2;  // words of a row of pixels
constexpr int ROW = FILLED + (40 - FILLED % 32) % 16;         // words of a padded row: 8 or 24 modulo 32, for the banks
constexpr int PLANE = HP * ROW + 1;                           // words of a channel: odd, for the banks
constexpr int COPY = (PICTURES * CI * PLANE + 31) / 32 * 32 + 16;
constexpr int PHASES = POOL == 1 ? 1 : 4 / PER;               // phases of a slot
constexpr int SLOTS_X = POOL == 2 ? PW : (PW + PER - 1) / PER;  // slots in a row
constexpr int SLOTS = PICTURES * PH * SLOTS_X;
constexpr int SLOT = (CO + 15) / 16 * 16 + 8;                 // words of a slot: 8 or 24 modulo 32, for the banks
constexpr int THREADS = WARPS_N * WARPS_S * 32;
constexpr int STEP = POOL == 2 ? 1 : PER;                     // outputs of a slot
constexpr int QUADS_G = (CO + 15) / 16 * 4;                   // groups of four output channels
constexpr word ONES = PER == 2 ? 0x3f803f80u : 0x3f800000u;

struct Pixels { Four pixel[PER + 1]; };
struct Slot { Four g[STEP]; word ways[STEP]; };

extern "C" __global__ void __launch_bounds__(THREADS) weights(
    const float* __restrict__ x, const activation* __restrict__ gradient, const byte* __restrict__ route,
    float* __restrict__ partial, int samples, int loops,
    long long sx_c, long long sx_b, int sx_h, int sx_w, int sx_k,
    long long sg_c, long long sg_b, int sg_h, int sg_w, int sg_k
) {
    SHARED(word, shared);
    word* pictures = shared;             // one or two copies of [PICTURES][CI][HP][ROW]
    word* slots = shared + PER * COPY;   // [SLOTS][SLOT]
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, g = lane / 4, t = lane % 4;
    const int part = warp % WARPS_N, share = warp / WARPS_N;
    const long long client = blockIdx.y;
    x += client * sx_c;
    gradient += client * sg_c;
    if (ROUTED) route += client * samples * (PH * PW * CO);

    int places[TILES];  // offset in a picture of each of this thread's columns
#pragma unroll
    for (int n = 0; n < TILES; n++) {
        const int column = (part * TILES + n) * 8 + g, tap = column % (KH * KW), kx = tap % KW;
        const int place = column / (KH * KW) * PLANE + tap / KW * ROW + kx / PER + kx % PER * COPY;
        places[n] = column < WINDOW ? place : 0;
    }
    float total[MT][TILES][4] = {};

    for (int loop = 0; loop < loops; loop++) {
        const int first = (blockIdx.x * loops + loop) * PICTURES;
        if (first >= samples) break;
        if (loop > 0) sync_threads();  // all threads must have read shared memory before it is overwritten
        stage<PICTURES * HP * FILLED, THREADS, 2>(thread,
            [&](int place) {
                const int at = place % FILLED, row = place / FILLED % HP - PAD;
                const int b = first + place / (FILLED * HP);
                Pixels all;
#pragma unroll
                for (int k = 0; k <= PER; k++) {
                    const int column = PER * at + k - PAD;
                    const bool there = b < samples && row >= 0 && row < IH && column >= 0 && column < IW;
                    const float* from = x + b * sx_b + row * sx_h + column * sx_w;
                    if (k < PER || PER == 2) all.pixel[k] = there ? four(from, sx_k, CI, VECTOR) : Four{0.f, 0.f, 0.f, 0.f};
                }
                return all;
            },
            [&](int place, Pixels all) {
                const int at = place % FILLED, row = place / FILLED % HP;
                const int picture = place / (FILLED * HP);
#pragma unroll
                for (int k = 0; k < 4; k++)
                    if (k < CI) {
                        word* to = pictures + (picture * CI + k) * PLANE + row * ROW + at;
                        to[0] = pack(all.pixel[0].v[k], all.pixel[PER - 1].v[k]);
                        if (PER == 2) to[COPY] = pack(all.pixel[1].v[k], all.pixel[PER].v[k]);
                    }
            });
        // In both layouts of the gradient, neighbouring threads load neighbouring numbers.
        stage<SLOTS * QUADS_G, THREADS, 4>(thread,
            [&](int i) {
                const int slot = G_LAST ? i / QUADS_G : i % SLOTS, channel = (G_LAST ? i % QUADS_G : i / SLOTS) * 4;
                const int px = slot % SLOTS_X * STEP, py = slot / SLOTS_X % PH, b = first + slot / (SLOTS_X * PH);
                Slot all;
#pragma unroll
                for (int k = 0; k < STEP; k++) {
                    all.g[k] = Four{0.f, 0.f, 0.f, 0.f};
                    all.ways[k] = POOL == 2 ? 0xffffffffu : 0u;
                    if (b < samples && px + k < PW && channel < CO) {
                        const activation* from = gradient + b * sg_b + py * sg_h + (px + k) * sg_w + channel * sg_k;
                        all.g[k] = four(from, sg_k, CO - channel, G_VECTOR);
                        const byte* way = route + (((long long)b * PH + py) * PW + px + k) * CO + channel;
                        if (ROUTED) all.ways[k] = ways(way, CO - channel, CO % 4 == 0);
                    }
                }
                return all;
            },
            [&](int i, Slot all) {
                const int slot = G_LAST ? i / QUADS_G : i % SLOTS, channel = (G_LAST ? i % QUADS_G : i / SLOTS) * 4;
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    const word way = all.ways[0] >> 8 * k & 0xff, next = all.ways[STEP - 1] >> 8 * k & 0xff;
                    const float here = all.g[0].v[k], beside = all.g[STEP - 1].v[k];
                    // The last byte of the word is the route. A bfloat16 is above that byte, and the last 13 bits of a
                    // TF32 are 0.
                    if (POOL == 2) slots[slot * SLOT + channel + k] = pack(PER == 2 ? 0.f : here, here) | way;
                    else slots[slot * SLOT + channel + k] = pack(way ? 0.f : here, next ? 0.f : beside);
                }
            });
        sync_threads();
        for (int group = share; group < (SLOTS + 7) / 8; group += WARPS_S) {
            int base[2];
            word a[PHASES][MT][4];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int slot = group * 8 + half * 4 + t, there = slot < SLOTS ? slot : 0;
                const int px = there % SLOTS_X, py = there / SLOTS_X % PH, picture = there / (SLOTS_X * PH);
                base[half] = picture * CI * PLANE + py * POOL * ROW + px * (POOL == 2 ? 2 / PER : 1);
#pragma unroll
                for (int r = 0; r < 2 * MT; r++) {
                    const word value = slot < SLOTS ? slots[slot * SLOT + r * 8 + g] : 0;
                    const word way = value & 0xff, low = value >> 16, high = value & 0xffffff00u;
#pragma unroll
                    for (int phase = 0; phase < PHASES; phase++) {
                        word& to = a[phase][r / 2][half * 2 + r % 2];
                        if (POOL == 1) to = value;
                        else if (PER == 1) to = way == phase ? high : 0;
                        else to = way == 2 * phase ? low : way == 2 * phase + 1 ? high : 0;
                    }
                }
            }
#pragma unroll
            for (int phase = 0; phase < PHASES; phase++)
#pragma unroll
                for (int n = 0; n < TILES; n++) {
                    const int place = places[n] + (PER == 2 ? phase * ROW : phase / 2 * ROW + phase % 2);
                    word b[2] = {pictures[base[0] + place], pictures[base[1] + place]};
                    if ((part * TILES + n) * 8 + g == WINDOW) b[0] = b[1] = ONES;
#pragma unroll
                    for (int m = 0; m < MT; m++) mma(total[m][n], a[phase][m], b);
                }
        }
    }

    // Warps with different positions have different sums. Add these sums in a fixed order.
    partial += ((long long)blockIdx.x * gridDim.y + client) * CO * (WINDOW + 1);
    if (WARPS_S == 1) {
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int n = 0; n < TILES; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int channel = m * 16 + g + e / 2 * 8, column = (part * TILES + n) * 8 + 2 * t + e % 2;
                    if (channel < CO && column <= WINDOW) partial[channel * (WINDOW + 1) + column] = total[m][n][e];
                }
    } else {
        constexpr int WIDE = WARPS_N * TILES * 8 + 1;
        float* sums = (float*)shared;  // [WARPS_S][MT * 16][WIDE]
        sync_threads();
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int n = 0; n < TILES; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int channel = m * 16 + g + e / 2 * 8, column = (part * TILES + n) * 8 + 2 * t + e % 2;
                    sums[(share * MT * 16 + channel) * WIDE + column] = total[m][n][e];
                }
        sync_threads();
        for (int i = thread; i < CO * (WINDOW + 1); i += THREADS) {
            const int channel = i / (WINDOW + 1), column = i % (WINDOW + 1);
            float sum = 0.f;
            for (int s = 0; s < WARPS_S; s++) sum += sums[(s * MT * 16 + channel) * WIDE + column];
            partial[i] = sum;
        }
    }
}

extern "C" __global__ void __launch_bounds__(256) add_up(
    const float* __restrict__ partial, float* __restrict__ dw, float* __restrict__ db, int shares
) {
    const int i = blockIdx.x * 256 + threadIdx.x, size = CO * (WINDOW + 1);
    const long long client = blockIdx.y, clients = gridDim.y;
    if (i >= size) return;
    float sum = 0.f;
#pragma unroll 16
    for (int s = 0; s < shares; s++) sum += partial[(s * clients + client) * size + i];
    const int channel = i / (WINDOW + 1), column = i % (WINDOW + 1);
    if (column < WINDOW) dw[client * CO * WINDOW + channel * WINDOW + column] = sum;
    else db[client * CO + channel] = sum;
}
#endif
