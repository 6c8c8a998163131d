// Compiled to see whether anything can be: the compiler may be absent, or the card too old for the primitives.

extern "C" __global__ void nothing(float* x) {
    const unsigned a[4] = {}, b[2] = {};
    mma(x, a, b);
}
