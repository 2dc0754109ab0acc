// See handle.h.
#include "handle.h"

#include <algorithm>
#include <cstring>

#include "../bytes.h"

namespace ftar::nccl {

namespace {
constexpr unsigned char kMagic[2] = {'F', 'N'};
constexpr int kVersion = 1;
constexpr unsigned char kNeedsToken = 1;
constexpr size_t kFixed = 8 + 2 * kSecretBytes;

const void* host_bytes(const Address& a) {
  return a.family() == AF_INET ? static_cast<const void*>(&reinterpret_cast<const sockaddr_in*>(&a.storage)->sin_addr)
                               : static_cast<const void*>(&reinterpret_cast<const sockaddr_in6*>(&a.storage)->sin6_addr);
}

bool link_local(const unsigned char* host) { return host[0] == 0xfe && (host[1] & 0xc0) == 0x80; }

size_t host_size(bool v6) { return v6 ? 16 : 4; }
}  // namespace

size_t Handle::write(unsigned char* out) const {
  std::memset(out, 0, kHandleBytes);
  std::memcpy(out, kMagic, sizeof kMagic);
  out[2] = kVersion;
  out[4] = needs_token ? kNeedsToken : 0;
  out[5] = static_cast<unsigned char>(device);
  if (!needs_token) std::memcpy(out + 8, secret.data(), kSecretBytes);
  std::memcpy(out + 8 + kSecretBytes, nonce.data(), kSecretBytes);
  size_t at = kFixed;
  size_t count = 0;
  uint16_t families = 0;
  for (const Address& rail : rails) {
    const bool v6 = rail.family() == AF_INET6;
    const size_t size = host_size(v6);
    if (count == kMaxHandleRails || at + size + 2 > kHandleBytes) break;
    if (v6) families = static_cast<uint16_t>(families | (1u << count));
    std::memcpy(out + at, host_bytes(rail), size);
    if (v6 && link_local(out + at)) put16(out + at + 2, static_cast<uint16_t>(reinterpret_cast<const sockaddr_in6*>(&rail.storage)->sin6_scope_id));
    put16(out + at + size, static_cast<uint16_t>(rail.port()));
    at += size + 2;
    ++count;
  }
  out[3] = static_cast<unsigned char>(count);
  put16(out + 6, families);
  return count;
}

std::string Handle::parse(const unsigned char* in) {
  if (std::memcmp(in, kMagic, sizeof kMagic) != 0) return "the handle was not made by this plugin: does the peer use it too?";
  if (in[2] != kVersion) {
    return "the peer's plugin speaks version " + std::to_string(in[2]) + " of the handle, this one version " +
           std::to_string(kVersion) + ": install the same ftctl on all nodes";
  }
  const size_t count = in[3];
  if (count == 0 || count > kMaxHandleRails || (in[4] & ~kNeedsToken) != 0) return "the handle is damaged";
  needs_token = (in[4] & kNeedsToken) != 0;
  device = in[5];
  const uint16_t families = get16(in + 6);
  secret.assign(reinterpret_cast<const char*>(in + 8), kSecretBytes);
  nonce.assign(reinterpret_cast<const char*>(in + 8 + kSecretBytes), kSecretBytes);
  rails.clear();
  size_t at = kFixed;
  for (size_t i = 0; i < count; ++i) {
    const bool v6 = (families >> i & 1) != 0;
    const size_t size = host_size(v6);
    if (at + size + 2 > kHandleBytes) return "the handle is damaged";
    Address a;
    if (v6) {
      auto* s = reinterpret_cast<sockaddr_in6*>(&a.storage);
      s->sin6_family = AF_INET6;
      std::memcpy(&s->sin6_addr, in + at, size);
      if (link_local(in + at)) {
        s->sin6_scope_id = get16(in + at + 2);
        s->sin6_addr.s6_addr[2] = s->sin6_addr.s6_addr[3] = 0;
      }
      a.length = sizeof *s;
    } else {
      auto* s = reinterpret_cast<sockaddr_in*>(&a.storage);
      s->sin_family = AF_INET;
      std::memcpy(&s->sin_addr, in + at, size);
      a.length = sizeof *s;
    }
    a.set_port(get16(in + at + size));
    if (a.port() == 0) return "the handle is damaged";
    rails.push_back(a);
    at += size + 2;
  }
  return "";
}

}  // namespace ftar::nccl
