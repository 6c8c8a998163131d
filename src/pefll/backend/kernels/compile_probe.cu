// Tests whether CUDA C++ compiles here. The compiler may be missing, or the GPU may be too old for `mma`.

extern "C" __global__ void compile_probe(float* x) {
    const unsigned a[4] = {}, b[2] = {};
    mma(x, a, b);
}
