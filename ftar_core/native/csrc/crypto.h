// SHA-256 and HMAC-SHA256 (FIPS 180-4, RFC 2104), for proofs that the other side knows the job token.
//
// Why HMAC-SHA256 and not SipHash or a TLS library: it is the proof the control plane uses too, its security needs no
// argument, it is 100 lines, and it is needed a few times a second only (handshakes, heartbeats), at about 1 us each.
// The token itself never leaves the process; data frames are not authenticated one by one: they travel on connections
// whose handshake was, and a job that needs more than that needs a network that encrypts.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace ftar {

using Hash = std::array<unsigned char, 32>;

Hash sha256(std::string_view data);
Hash hmac_sha256(std::string_view key, std::string_view data);

// The same time for any two strings of one length.
bool equal_secret(std::string_view a, std::string_view b);

std::string random_bytes(size_t n);  // from the kernel; throws std::system_error

inline std::string_view view(const Hash& h) { return {reinterpret_cast<const char*>(h.data()), h.size()}; }

}  // namespace ftar
