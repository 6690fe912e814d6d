// Included by the vector paths: chooses the loop that is compiled for a width of codes.

std::size_t pack(const std::uint8_t* exponents, std::size_t groups, const CodeTable& table, std::uint8_t* planes,
                 std::uint8_t* escapes) {
    switch (table.bits) {
        case 2:
            return pack_bits<2>(exponents, groups, table, planes, escapes);
        case 3:
            return pack_bits<3>(exponents, groups, table, planes, escapes);
        default:
            return pack_bits<4>(exponents, groups, table, planes, escapes);
    }
}

bool unpack(const std::uint8_t* planes, std::size_t groups, unsigned bits, const std::uint8_t* exponent_of,
            const std::uint8_t* escapes, std::size_t escape_count, std::uint8_t* exponents) {
    switch (bits) {
        case 2:
            return unpack_bits<2>(planes, groups, exponent_of, escapes, escape_count, exponents);
        case 3:
            return unpack_bits<3>(planes, groups, exponent_of, escapes, escape_count, exponents);
        default:
            return unpack_bits<4>(planes, groups, exponent_of, escapes, escape_count, exponents);
    }
}
