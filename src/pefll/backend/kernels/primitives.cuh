// Functions for special instructions of the GPU. The kernels are plain C++ and call these functions.

#define SHARED(type, name) extern __shared__ __align__(16) type name[]
#define sync_threads __syncthreads

#if BF16
// Return two numbers, rounded to bfloat16, as one word.
__device__ __forceinline__ unsigned pack(float low, float high) {
    unsigned both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
#define PRODUCT "m16n8k16.row.col.f32.bf16.bf16.f32"
#else
// Return the first number, rounded to TF32, as one word. The second argument is ignored.
__device__ __forceinline__ unsigned pack(float first, float) {
    unsigned one;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(one) : "f"(first));
    return one;
}
#define PRODUCT "m16n8k8.row.col.f32.tf32.tf32.f32"
#endif

// Return a number as a float. The argument is a float, or the bits of a bfloat16.
__device__ __forceinline__ float widened(float number) { return number; }
__device__ __forceinline__ float widened(unsigned short bits) { return __uint_as_float((unsigned)bits << 16); }

__device__ __forceinline__ void load4(float v[4], const float* __restrict__ from) {
    const float4 all = *reinterpret_cast<const float4*>(from);
    v[0] = all.x, v[1] = all.y, v[2] = all.z, v[3] = all.w;
}

__device__ __forceinline__ void load4(float v[4], const unsigned short* __restrict__ from) {
    const ushort4 all = *reinterpret_cast<const ushort4*>(from);
    v[0] = widened(all.x), v[1] = widened(all.y), v[2] = widened(all.z), v[3] = widened(all.w);
}

__device__ __forceinline__ void store2(float* to, float first, float second) {
    *reinterpret_cast<float2*>(to) = make_float2(first, second);
}

__device__ __forceinline__ void store2(unsigned short* to, float first, float second) {
    *reinterpret_cast<unsigned*>(to) = pack(first, second);
}

__device__ __forceinline__ void mma(float c[4], const unsigned a[4], const unsigned b[2]) {
    asm volatile(
        "mma.sync.aligned." PRODUCT " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1])
    );
}
