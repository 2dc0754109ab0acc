// The 128 bytes that a listener gives and NCCL carries to whoever shall connect: all that the two sides exchange.
//
//     0  magic "FN"   2  version   3  number of rails   4  flags   5  device   6  families, a bit a rail (1: IPv6)
//     8  secret (16)  24  nonce of the listener (16)  40  for each rail its address (4 or 16) and port (2)
//
// The rails stand in the order of preference of the listener's device: its own NIC, its backup, the others. 14 IPv4 or
// four IPv6 rails fit; more are left out.
//
// The first half of the nonce is the same for all listeners of a process: its name for operators.
//
// A link-local address means nothing without a network; whoever reads it takes the rail of the same number for the
// neighbour, so that number (plus one) travels in the third and fourth byte of the address, which are always zero there.
// In `rails` it is the scope.
//
// The secret is what a connection has to prove (frame.h): random, made anew by every process that listens. It travels
// over NCCL's bootstrap, which is neither encrypted nor authenticated, so it keeps out whoever cannot read that: another
// job's ranks, a scanner, a stale peer. Where that is too little, FTAR_TOKEN_FILE holds the proof, and the handle then
// carries no secret.
#pragma once
#include <string>
#include <vector>

#include "../netio.h"
#include "abi.h"

namespace ftar::nccl {

inline constexpr size_t kSecretBytes = 16;
inline constexpr size_t kMaxHandleRails = 16;

struct Handle {
  int device = 0;
  bool needs_token = false;
  std::string secret;  // kSecretBytes; all zero if needs_token
  std::string nonce;   // kSecretBytes
  std::vector<Address> rails;

  // Writes kHandleBytes and returns how many rails fitted.
  size_t write(unsigned char* out) const;
  // Empty, or what is wrong with these kHandleBytes.
  std::string parse(const unsigned char* in);
};

}  // namespace ftar::nccl
