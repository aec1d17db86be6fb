/* The 16-bit numbers of the emulators as a program: bits of such numbers become floats, bits of floats become them.

   Both ways are asked in one call: all 65,536 patterns as floats go out first, then a pattern for each float that
   comes in. */

#include "emulated.hpp"

int main() {
    for (unsigned int bits = 0; bits < 65536; ++bits) {
        const float value = to_float(bits);
        fwrite(&value, 4, 1, stdout);
    }
    for (float value; fread(&value, 4, 1, stdin) == 1;) {
        const unsigned short bits = to_bits(value);
        fwrite(&bits, 2, 1, stdout);
    }
    return 0;
}
