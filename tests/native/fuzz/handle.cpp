// The 128 bytes that one process gives another over NCCL, and which rails are then paired.
#include "handle.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "bytes.h"
#include "fuzz.h"
#include "netio.h"
#include "rails.h"

using namespace ftar;
using namespace ftar::nccl;

namespace {

std::vector<Nic> ours() {
  std::vector<Nic> nics;
  int bits = 8;
  for (const char* host : {"127.0.0.1", "10.77.0.1", "10.77.1.1", "fd77::1"}) {
    Nic n;
    n.config = {"rail" + std::to_string(nics.size()), "", host};
    n.address = parse_address(host, 0, "");
    n.prefix_bits = bits += 12;  // also lengths that end in the middle of a byte
    nics.push_back(n);
  }
  return nics;
}

std::string made(std::initializer_list<const char*> hosts, bool token) {
  Handle h;
  h.device = 1;
  h.needs_token = token;
  h.secret = "sixteen secrets!";
  h.nonce = "sixteen nonces!!";
  for (const char* host : hosts) h.rails.push_back(parse_address(host, 7601, ""));
  unsigned char out[kHandleBytes];
  h.write(out);
  return {reinterpret_cast<const char*>(out), sizeof out};
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::vector<Nic> nics = ours();
  const auto in = std::make_unique<unsigned char[]>(kHandleBytes);  // exactly so many: one byte too far is seen
  std::memset(in.get(), 0, kHandleBytes);
  if (size > 0) std::memcpy(in.get(), data, std::min<size_t>(size, kHandleBytes));
  Handle h;
  if (!h.parse(in.get()).empty()) return 0;
  must(!h.rails.empty() && h.rails.size() <= kMaxHandleRails, "a handle has rails, and not too many");
  const std::vector<RailPair> pairs = pair_rails(nics, {2, 0, 1, 3}, h.rails, 4);
  must(pairs.size() <= 4, "no more pairs than wanted");
  unsigned char out[kHandleBytes];
  must(h.write(out) == h.rails.size(), "all rails of a handle fit into a handle");
  Handle again;
  must(again.parse(out).empty() && again.rails.size() == h.rails.size(), "a handle is read as it was written");
  must(again.nonce == h.nonce && again.device == h.device && again.needs_token == h.needs_token, "the same handle");
  return 0;
}

std::vector<std::string> fuzz_seeds() {
  return {made({"10.77.0.2"}, false), made({"10.77.0.2", "10.77.1.2"}, true), made({"fd77::2", "10.77.1.2"}, false),
          made({"fd77::2", "fd77::3", "fd77::4", "fd77::5"}, false)};
}
