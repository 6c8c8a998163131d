// Convolutions with a client axis in bfloat16 or TF32: a block takes a few pictures of one client into shared memory, once.
//
// Triton's kernels (convolution.py, laid.py) fetch every window of a picture from the L2 cache, so that a pixel comes
// some ten times, and write the gradients that pooling lets through position by position. Here a picture is read once,
// rounded on the way, and windows are addresses in shared memory; the layouts below make a warp's 32 addresses fall into
// different banks. Constants in capitals are given to the compiler, see pictures.py. `mma` is the tensor cores' product
// of 16 x 8 and 8 x 8 words by a warp: lane = 4 g + t holds, of the first factor, rows g and g + 8 at columns t and t + 4;
// of the second, column g at rows t and t + 4; of the result, rows g and g + 8 at columns 2t, 2t + 1.

typedef unsigned int word;  // two bfloat16, which are multiplied as a pair and added, or one TF32
constexpr int PER = BF16 ? 2 : 1;  // numbers in a word
typedef unsigned char byte;

struct Four { float v[4]; };

// Put N items into shared memory, some of which are fetched at once: one after the other would wait for each.
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

// Up to four channels, of which `there` are there.
__device__ __forceinline__ Four four(const float* __restrict__ from, int apart, int there, bool in_one) {
    Four all = {0.f, 0.f, 0.f, 0.f};
    if (in_one) {
        load4(all.v, from);
    } else {
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (k < there) all.v[k] = from[k * apart];
    }
    return all;
}

// The routes of up to four channels, a byte each; those that are not there are of nobody.
__device__ __forceinline__ word ways(const byte* __restrict__ from, int there, bool in_one) {
    if (in_one) return *(const word*)from;
    word all = 0xffffffffu;
#pragma unroll
    for (int k = 0; k < 4; k++)
        if (k < there) all = (all & ~(0xffu << 8 * k)) | (word)from[k] << 8 * k;
    return all;
}

#if defined(CONVOLVE)
// ---- Outputs of a convolution, pooled and through ReLU; or, BACKWARD, gradients of its inputs, which are a convolution
// ---- of the outputs' gradients with the filters turned round.
//
// Rows of a product are outputs: for 2 x 2 pooling the four positions of a cell are rows of one thread. Columns are output
// channels. The sum runs over words of input channels, and for each over the taps of the filter: then both staging of
// filters and fetching of windows step through neighbouring words.

constexpr int TAPS = KH * KW;
constexpr int WORDS = (CI + PER - 1) / PER;      // of input channels
constexpr int PIXEL = WORDS | 1;                 // words that a pixel takes: odd, for the banks
constexpr int STEPS = (WORDS * TAPS + 7) / 8;    // products, of 8 words each
constexpr int FILTER = STEPS * 8 + 4;            // words of a filter: 4 more than a multiple of 8, for the banks
constexpr int TILES = (CO + 7) / 8;              // of output channels
constexpr int PICTURE = HP * WP * PIXEL;         // words
constexpr int CELLS = PICTURES * PH * PW;        // outputs of a block
constexpr int GROUP = POOL == 2 ? MT * 4 : MT * 16;  // outputs that a warp computes at once
constexpr int THREADS = WARPS * 32;
constexpr bool HELD = STEPS * TILES <= 20;       // whether a thread keeps its part of the filters in registers

struct Two { float low, high; };
struct Gradients { Four g; word ways; };

extern "C" __global__ void __launch_bounds__(THREADS) convolve(
    const float* __restrict__ x, const byte* __restrict__ route_in, const float* __restrict__ w,
    const float* __restrict__ bias, float* __restrict__ y, byte* __restrict__ route, int samples,
    long long sx_c, long long sx_b, int sx_h, int sx_w, int sx_k, long long sw_c, long long sb_c
) {
    SHARED(word, shared);
    word* filters = shared;                                   // [TILES * 8][FILTER]
    word* pictures = shared + TILES * 8 * FILTER;             // [PICTURES][HP][WP][PIXEL]
    word* places = pictures + PICTURES * PICTURE;             // [STEPS][4]: where the words of a step are in a window
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, g = lane / 4, t = lane % 4;
    const long long client = blockIdx.y;
    const int first = blockIdx.x * PICTURES;
    x += client * sx_c;
    w += client * sw_c;
    if (BACKWARD && ROUTED) route_in += client * samples * (GH * GW * CI);

    for (int i = thread; i < STEPS * 4; i += THREADS) {
        word both = 0;
        for (int half = 0; half < 2; half++) {
            int k = i / 4 * 8 + i % 4 + half * 4, tap = k % TAPS;
            // Beyond the last word filters are 0; the pixel is any that is there.
            int place = k < WORDS * TAPS ? (tap / KW * WP + tap % KW) * PIXEL + k / TAPS : 0;
            both |= (word)place << (16 * half);
        }
        places[i] = both;
    }
    stage<TILES * 8 * STEPS * 8, THREADS, 8>(thread,
        [&](int i) {
            int k = i % (STEPS * 8), out = i / (STEPS * 8), tap = k % TAPS, in = k / TAPS * PER;
            Two both = {0.f, 0.f};
            if (out < CO && k < WORDS * TAPS) {
                int at = BACKWARD ? (in * CO + out) * TAPS + TAPS - 1 - tap : (out * CI + in) * TAPS + tap;
                both.low = w[at];
                if (PER == 2 && in + 1 < CI) both.high = w[at + (BACKWARD ? CO * TAPS : TAPS)];
            }
            return both;
        },
        [&](int i, Two both) { filters[i / (STEPS * 8) * FILTER + i % (STEPS * 8)] = pack(both.low, both.high); });
    constexpr int QUADS = (CI + 3) / 4;
    auto put = [&](int pixel, int quad, Four all) {
#pragma unroll
        for (int k = 0; k < 4; k += PER)
            if (quad * 4 + k < CI) pictures[pixel * PIXEL + (quad * 4 + k) / PER] = pack(all.v[k], all.v[k + PER - 1]);
    };
    if (BACKWARD) {
        // Around the gradients, and where a position did not win, there is nothing.
        for (int i = thread; i < PICTURES * PICTURE; i += THREADS) pictures[i] = 0;
        sync_threads();
        stage<PICTURES * QUADS * GH * GW, THREADS, 4>(thread,
            [&](int i) {
                int cell = i % (GH * GW), quad = i / (GH * GW) % QUADS, b = first + i / (GH * GW * QUADS);
                Gradients all = {{0.f, 0.f, 0.f, 0.f}, 0u};
                if (b < samples) {
                    const float* from = x + b * sx_b + cell / GW * sx_h + cell % GW * sx_w + quad * 4 * sx_k;
                    all.g = four(from, sx_k, CI - quad * 4, VECTOR);
                    const byte* way = route_in + ((long long)b * (GH * GW) + cell) * CI + quad * 4;
                    if (ROUTED) all.ways = ways(way, CI - quad * 4, CI % 4 == 0);
                }
                return all;
            },
            [&](int i, Gradients all) {
                int cell = i % (GH * GW), quad = i / (GH * GW) % QUADS, picture = i / (GH * GW * QUADS);
#pragma unroll
                for (int place = 0; place < GPOOL * GPOOL; place++) {
                    Four won;
#pragma unroll
                    for (int k = 0; k < 4; k++) won.v[k] = (all.ways >> 8 * k & 0xff) == place ? all.g.v[k] : 0.f;
                    int row = cell / GW * GPOOL + place / GPOOL + TOP, column = cell % GW * GPOOL + place % GPOOL + LEFT;
                    put((picture * HP + row) * WP + column, quad, won);
                }
            });
    } else {
        stage<PICTURES * HP * WP * QUADS, THREADS, 4>(thread,
            [&](int i) {
                int quad = i % QUADS, pixel = i / QUADS, column = pixel % WP - LEFT, row = pixel / WP % HP - TOP;
                int b = first + pixel / (WP * HP);
                if (b >= samples || row < 0 || row >= IH || column < 0 || column >= IW) return Four{0.f, 0.f, 0.f, 0.f};
                return four(x + b * sx_b + row * sx_h + column * sx_w + quad * 4 * sx_k, sx_k, CI - quad * 4, VECTOR);
            },
            [&](int i, Four all) { put(i / QUADS, i % QUADS, all); });
    }
    sync_threads();

    word held[HELD ? STEPS : 1][TILES][2];
    if (HELD) {
#pragma unroll
        for (int step = 0; step < STEPS; step++)
#pragma unroll
            for (int n = 0; n < TILES; n++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    held[HELD ? step : 0][n][half] = filters[(n * 8 + g) * FILTER + step * 8 + half * 4 + t];
    }
    for (int group = warp; group < (CELLS + GROUP - 1) / GROUP; group += WARPS) {
        int base[2 * MT];  // where the windows of this thread's rows begin
#pragma unroll
        for (int r = 0; r < 2 * MT; r++) {
            int cell = group * GROUP + (POOL == 2 ? r / 4 : r) * 8 + g, place = POOL == 2 ? r % 4 : 0;
            if (cell >= CELLS) cell = 0;
            int rest = cell % (PH * PW), row = rest / PW * POOL + place / 2, column = rest % PW * POOL + place % 2;
            base[r] = cell / (PH * PW) * PICTURE + (row * WP + column) * PIXEL;
        }
        float total[MT][TILES][4];
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int n = 0; n < TILES; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) total[m][n][e] = 0.f;
#pragma unroll (HELD ? STEPS : 5)
        for (int step = 0; step < STEPS; step++) {
            const word both = places[step * 4 + t];
            const word *low = pictures + (both & 0xffff), *high = pictures + (both >> 16);
            word a[MT][4];
#pragma unroll
            for (int m = 0; m < MT; m++) {
                a[m][0] = low[base[2 * m]];
                a[m][1] = low[base[2 * m + 1]];
                a[m][2] = high[base[2 * m]];
                a[m][3] = high[base[2 * m + 1]];
            }
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                const word* f = filters + (n * 8 + g) * FILTER + step * 8 + t;
                const word b[2] = {HELD ? held[HELD ? step : 0][n][0] : f[0], HELD ? held[HELD ? step : 0][n][1] : f[4]};
#pragma unroll
                for (int m = 0; m < MT; m++) mma(total[m][n], a[m], b);
            }
        }
#pragma unroll
        for (int r = 0; r < (POOL == 2 ? MT / 2 : 2 * MT); r++) {
            const int cell = group * GROUP + r * 8 + g, b = first + cell / (PH * PW), rest = cell % (PH * PW);
            if (cell >= CELLS || b >= samples) continue;
            const long long out = (client * samples + b) * (PH * PW);
#pragma unroll
            for (int n = 0; n < TILES; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int channel = n * 8 + 2 * t + e;
                    float value = POOL == 2 ? total[2 * r][n][e] : total[r / 2][n][r % 2 * 2 + e];
                    int winner = 0;
                    if (POOL == 2) {
#pragma unroll
                        for (int place = 1; place < 4; place++) {
                            const float other = total[2 * r + place / 2][n][place % 2 * 2 + e];
                            if (other > value || other != other) value = other, winner = place;  // NaN wins
                        }
                    }
                    if (channel >= CO) continue;
                    if (HAS_BIAS) value += bias[client * sb_c + channel];
                    if (RELU && value <= 0.f) value = 0.f, winner = 255;
                    y[out * CO + (CHANNELS_FIRST ? channel * (PH * PW) + rest : rest * CO + channel)] = value;
                    if (RELU || POOL == 2) route[(out + rest) * CO + channel] = (byte)winner;
                }
        }
    }
}
#endif

#if defined(WEIGHTS)
// ---- Shares of the gradient of filters and bias.
//
// Rows of a product are output channels, columns the weights of one filter, in the order in which they lie in memory, and
// after the last the bias. The sum runs over words of neighbouring positions: with 2 x 2 pooling, those of one cell come in
// several phases. Of bfloat16, a pair of pixels that begins at an odd column is in a second copy of the picture, which is
// one pixel to the left.

constexpr int WINDOW = CI * KH * KW;
constexpr int COLUMNS = (WINDOW + 1 + 7) / 8;                 // tiles of them
constexpr int TILES = (COLUMNS + WARPS_N - 1) / WARPS_N;      // of one warp
constexpr int FILLED = PER == 1 ? WP : POOL == 1 && PW % 2 ? WP / 2 + 1 : (WP + 1) / 2;  // words that a row of pixels has
constexpr int ROW = FILLED + (40 - FILLED % 32) % 16;         // and takes: 8 or 24 in 32, for the banks
constexpr int PLANE = HP * ROW + 1;                           // words of a channel: odd enough for staging
constexpr int COPY = (PICTURES * CI * PLANE + 31) / 32 * 32 + 16;
constexpr int PHASES = POOL == 1 ? 1 : 4 / PER;               // words of positions in a cell
constexpr int SLOTS_X = POOL == 2 ? PW : (PW + PER - 1) / PER;  // cells in a row, or words of positions without pooling
constexpr int SLOTS = PICTURES * PH * SLOTS_X;
constexpr int SLOT = (CO + 15) / 16 * 16 + 8;                 // words of a slot: 8 or 24 in 32, for the banks
constexpr int THREADS = WARPS_N * WARPS_S * 32;
constexpr int STEP = POOL == 2 ? 1 : PER;                     // pooled outputs of a slot
constexpr int QUADS = (CI + 3) / 4, QUADS_G = (CO + 15) / 16 * 4;  // fours of channels
constexpr word ONES = PER == 2 ? 0x3f803f80u : 0x3f800000u;

struct Pixels { Four pixel[PER + 1]; };
struct Slot { Four g[STEP]; word ways[STEP]; };

extern "C" __global__ void __launch_bounds__(THREADS) weights(
    const float* __restrict__ x, const float* __restrict__ gradient, const byte* __restrict__ route,
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

    int places[TILES];  // of this thread's columns in a picture
#pragma unroll
    for (int n = 0; n < TILES; n++) {
        const int column = (part * TILES + n) * 8 + g, tap = column % (KH * KW), kx = tap % KW;
        const int place = column / (KH * KW) * PLANE + tap / KW * ROW + kx / PER + kx % PER * COPY;
        places[n] = column < WINDOW ? place : 0;
    }
    float total[MT][TILES][4];
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) total[m][n][e] = 0.f;

    for (int loop = 0; loop < loops; loop++) {
        const int first = (blockIdx.x * loops + loop) * PICTURES;
        if (first >= samples) break;
        if (loop > 0) sync_threads();  // before what is there is overwritten
        stage<PICTURES * QUADS * HP * FILLED, THREADS, 2>(thread,
            [&](int i) {
                const int quad = i % QUADS, place = i / QUADS, at = place % FILLED, row = place / FILLED % HP - PAD;
                const int b = first + place / (FILLED * HP);
                Pixels all;
#pragma unroll
                for (int k = 0; k <= PER; k++) {
                    const int column = PER * at + k - PAD;
                    const bool there = b < samples && row >= 0 && row < IH && column >= 0 && column < IW;
                    const float* from = x + b * sx_b + row * sx_h + column * sx_w + quad * 4 * sx_k;
                    if (k < PER || PER == 2) all.pixel[k] = there ? four(from, sx_k, CI - quad * 4, VECTOR) : Four{0.f, 0.f, 0.f, 0.f};
                }
                return all;
            },
            [&](int i, Pixels all) {
                const int quad = i % QUADS, place = i / QUADS, at = place % FILLED, row = place / FILLED % HP;
                const int picture = place / (FILLED * HP);
#pragma unroll
                for (int k = 0; k < 4; k++)
                    if (quad * 4 + k < CI) {
                        word* to = pictures + (picture * CI + quad * 4 + k) * PLANE + row * ROW + at;
                        to[0] = pack(all.pixel[0].v[k], all.pixel[PER - 1].v[k]);
                        if (PER == 2) to[COPY] = pack(all.pixel[1].v[k], all.pixel[PER].v[k]);
                    }
            });
        // Neighbouring threads fetch neighbouring gradients, whichever way they lie.
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
                        const float* from = gradient + b * sg_b + py * sg_h + (px + k) * sg_w + channel * sg_k;
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
                    // In one word, which has room: a bfloat16 above the byte, or a TF32, whose last 13 bits are 0.
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

    // Warps that had other positions are added up in order.
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
