// See rails.h.
#include "rails.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <sstream>
#include <stdexcept>

namespace ftar::nccl {

namespace {

struct Entry {
  std::string device;
  unsigned flags = 0;
  Address address;
  int prefix_bits = 0;
};

const unsigned char* host_bytes(const Address& a) {
  return a.family() == AF_INET
             ? reinterpret_cast<const unsigned char*>(&reinterpret_cast<const sockaddr_in*>(&a.storage)->sin_addr)
             : reinterpret_cast<const unsigned char*>(&reinterpret_cast<const sockaddr_in6*>(&a.storage)->sin6_addr);
}

bool is_loopback(const Address& a) {
  const unsigned char* b = host_bytes(a);
  return a.family() == AF_INET ? b[0] == 127 : IN6_IS_ADDR_LOOPBACK(reinterpret_cast<const in6_addr*>(b));
}

bool is_link_local(const Address& a) {
  return a.family() == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(reinterpret_cast<const in6_addr*>(host_bytes(a)));
}

// Every address of this network namespace.
std::vector<Entry> entries() {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) throw std::invalid_argument(std::string("getifaddrs: ") + std::strerror(errno));
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(list, ::freeifaddrs);
  std::vector<Entry> found;
  for (const ifaddrs* i = list; i != nullptr; i = i->ifa_next) {
    if (i->ifa_addr == nullptr) continue;
    const int family = i->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    Entry e;
    e.device = i->ifa_name;
    e.flags = i->ifa_flags;
    e.address.length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    std::memcpy(&e.address.storage, i->ifa_addr, e.address.length);
    e.address.set_port(0);
    if (i->ifa_netmask != nullptr) {
      Address mask;
      mask.length = e.address.length;
      std::memcpy(&mask.storage, i->ifa_netmask, mask.length);
      mask.storage.ss_family = static_cast<sa_family_t>(family);
      const unsigned char* m = host_bytes(mask);
      for (int k = 0; k < (family == AF_INET ? 4 : 16); ++k) e.prefix_bits += std::popcount(m[k]);
    }
    found.push_back(std::move(e));
  }
  return found;
}

// The device of the default route with the lowest metric; IPv4 first. Empty: there is none.
std::string management_device() {
  constexpr unsigned kUp = 1, kReject = 0x200;
  std::string best;
  unsigned long best_metric = ULONG_MAX;
  std::string line;
  std::ifstream v4("/proc/net/route");
  std::getline(v4, line);
  while (std::getline(v4, line)) {
    std::istringstream words(line);
    std::string device, destination, gateway, mask;
    unsigned flags = 0;
    unsigned long refs = 0, use = 0, metric = 0;
    words >> device >> destination >> gateway >> std::hex >> flags >> std::dec >> refs >> use >> metric >> mask;
    if (!words || destination != "00000000" || mask != "00000000" || (flags & kUp) == 0 || (flags & kReject) != 0) continue;
    if (metric < best_metric) {
      best_metric = metric;
      best = device;
    }
  }
  if (!best.empty()) return best;
  std::ifstream v6("/proc/net/ipv6_route");
  while (std::getline(v6, line)) {
    std::istringstream words(line);
    std::string destination, source, source_bits, gateway, device;
    unsigned bits = 1, flags = 0;
    unsigned long metric = 0, refs = 0, use = 0;
    words >> destination >> std::hex >> bits >> source >> source_bits >> gateway >> metric >> refs >> use >> flags >> device;
    if (!words || bits != 0 || destination.find_first_not_of('0') != std::string::npos) continue;
    if (device == "lo" || (flags & kUp) == 0 || (flags & kReject) != 0) continue;
    if (metric < best_metric) {
      best_metric = metric;
      best = device;
    }
  }
  return best;
}

bool exists(const std::string& path) { return ::access(path.c_str(), F_OK) == 0; }

int read_number(const std::string& path, int otherwise) {
  std::ifstream file(path);
  int value = 0;
  return file >> value ? value : otherwise;
}

Nic make_nic(std::string name, const std::string& device, const Entry& entry) {
  Nic nic;
  nic.config = {std::move(name), is_loopback(entry.address) ? "" : device, entry.address.host()};
  nic.address = entry.address;
  nic.prefix_bits = entry.prefix_bits;
  const std::string sys = "/sys/class/net/" + device;
  if (char* real = ::realpath((sys + "/device").c_str(), nullptr)) {
    nic.pci_path = real;
    ::free(real);
  }
  nic.numa_node = read_number(sys + "/device/numa_node", -1);
  if (const int speed = read_number(sys + "/speed", -1); speed > 0) {
    nic.speed_mbit = speed;
    nic.speed_known = true;
  }
  return nic;
}

std::vector<std::string> split(const std::string& text, char by) {
  std::vector<std::string> parts;
  std::istringstream stream(text + by);
  for (std::string part; std::getline(stream, part, by);) {
    const size_t first = part.find_first_not_of(" \t");
    const size_t last = part.find_last_not_of(" \t");
    parts.push_back(first == std::string::npos ? "" : part.substr(first, last - first + 1));
  }
  return parts;
}

[[noreturn]] void wrong(const char* variable, const std::string& text, const std::string& reason) {
  throw std::invalid_argument(std::string(variable) + "=" + text + ": " + reason);
}

bool valid_name(const std::string& name) {
  const auto good = [](unsigned char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '.' || c == '_' || c == '-'; };
  return !name.empty() && name.size() <= 63 && std::all_of(name.begin(), name.end(), good);
}

// The address of a device that stands for it: the first IPv4 one, or else the first global IPv6 one, or else (only if
// the device was named) a link-local one.
const Entry* first_address(const std::vector<Entry>& all, const std::string& device) {
  const Entry* v6 = nullptr;
  const Entry* local = nullptr;
  for (const Entry& e : all) {
    if (e.device != device) continue;
    if (e.address.family() == AF_INET) return &e;
    const Entry*& best = is_link_local(e.address) ? local : v6;
    if (best == nullptr) best = &e;
  }
  return v6 != nullptr ? v6 : local;
}

bool same_host(const Address& a, const Address& b) {
  return a.family() == b.family() && std::memcmp(host_bytes(a), host_bytes(b), a.family() == AF_INET ? 4 : 16) == 0;
}

Nic named(const std::string& text, const std::string& part, const std::vector<Entry>& all) {
  const size_t equals = part.find('=');
  const std::string name = part.substr(0, equals);
  if (!valid_name(name) && equals != std::string::npos) {
    wrong("FTAR_NET_RAILS", text, "'" + name + "' is no name for a rail: 1 to 63 of [a-z0-9._-]");
  }
  if (equals == std::string::npos) {
    if (::if_nametoindex(part.c_str()) == 0) {
      wrong("FTAR_NET_RAILS", text, "there is no network device '" + part + "'; compare with: ip -brief address");
    }
    const Entry* e = first_address(all, part);
    if (e == nullptr) wrong("FTAR_NET_RAILS", text, "the device " + part + " has no address; run: ip addr add ADDRESS/PREFIX dev " + part);
    return make_nic(part, part, *e);
  }
  const std::string rest = part.substr(equals + 1);
  const size_t at = rest.find('@');
  const std::string device = at == std::string::npos ? "" : rest.substr(at + 1);
  const Address address = parse_address(rest.substr(0, at), 0, device);  // throws for what is no address
  if (is_link_local(address) && device.empty()) {
    wrong("FTAR_NET_RAILS", text, "the link-local address " + address.host() + " needs its device; write " + part + "@DEVICE");
  }
  if (is_loopback(address)) {
    Entry e;
    e.address = address;
    e.prefix_bits = address.family() == AF_INET ? 8 : 128;
    return make_nic(name, device.empty() ? "lo" : device, e);
  }
  for (const Entry& e : all) {
    if (same_host(e.address, address) && (device.empty() || e.device == device)) return make_nic(name, e.device, e);
  }
  wrong("FTAR_NET_RAILS", text,
        (device.empty() ? "no device of this machine has" : device + " does not have") + (" the address " + address.host()) +
            "; compare with: ip -brief address");
}

// Where two NICs sit, as far as the kernel says: the ports of a card are functions of one PCI slot.
std::string card(const Nic& nic) {
  const size_t dot = nic.pci_path.rfind('.');
  const size_t slash = nic.pci_path.rfind('/');
  return dot == std::string::npos || (slash != std::string::npos && dot < slash) ? nic.pci_path : nic.pci_path.substr(0, dot);
}

int distance(const Nic& a, const Nic& b) {
  if (a.numa_node >= 0 && b.numa_node >= 0 && a.numa_node != b.numa_node) return 2;
  return !a.pci_path.empty() && card(a) == card(b) ? 1 : 0;
}

uint32_t scope(const Address& a) { return reinterpret_cast<const sockaddr_in6*>(&a.storage)->sin6_scope_id; }

bool same_network(const Nic& ours, const Address& theirs) {
  if (ours.address.family() != theirs.family()) return false;
  const unsigned char* a = host_bytes(ours.address);
  const unsigned char* b = host_bytes(theirs);
  const int whole = ours.prefix_bits / 8;
  if (std::memcmp(a, b, static_cast<size_t>(whole)) != 0) return false;
  const int rest = ours.prefix_bits % 8;
  return rest == 0 || ((a[whole] ^ b[whole]) >> (8 - rest)) == 0;
}

}  // namespace

std::vector<Nic> find_rails(const std::string& wanted) {
  const std::vector<Entry> all = entries();
  std::vector<Nic> rails;
  if (!wanted.empty()) {
    for (const std::string& part : split(wanted, ',')) {
      if (part.empty()) wrong("FTAR_NET_RAILS", wanted, "an empty entry");
      Nic nic = named(wanted, part, all);
      for (const Nic& other : rails) {
        if (other.config.name == nic.config.name) wrong("FTAR_NET_RAILS", wanted, "the rail " + nic.config.name + " is named twice");
        if (same_host(other.address, nic.address)) wrong("FTAR_NET_RAILS", wanted, "two rails have the address " + nic.config.address);
      }
      rails.push_back(std::move(nic));
    }
    return rails;
  }
  const std::string management = management_device();
  for (const Entry& e : all) {
    const bool known = std::any_of(rails.begin(), rails.end(), [&](const Nic& n) { return n.config.device == e.device; });
    const std::string sys = "/sys/class/net/" + e.device;
    if (known || is_link_local(e.address) || (e.flags & IFF_UP) == 0 || (e.flags & (IFF_LOOPBACK | IFF_POINTOPOINT)) != 0 || e.device == management) continue;
    if (exists(sys + "/bridge") || exists(sys + "/tun_flags")) continue;
    rails.push_back(make_nic(e.device, e.device, *first_address(all, e.device)));
  }
  if (rails.empty()) {
    throw std::invalid_argument(
        "no NIC can be a rail: one must be up, have an address, and be neither loopback nor the management NIC" +
        (management.empty() ? "" : " (" + management + ", which has the default route)") +
        "; to use a NIC all the same: export FTAR_NET_RAILS=" + (management.empty() ? "DEVICE" : management));
  }
  return rails;
}

std::vector<std::vector<int>> preference(const std::vector<Nic>& rails, const std::string& backups) {
  const int n = static_cast<int>(rails.size());
  const auto index = [&](const std::string& name) {
    for (int i = 0; i < n; ++i) {
      if (rails[static_cast<size_t>(i)].config.name == name) return i;
    }
    wrong("FTAR_NET_BACKUP", backups, "there is no rail '" + name + "'");
  };
  std::vector<int> chosen(rails.size(), -1);
  if (!backups.empty() && backups != "none") {
    for (const std::string& part : split(backups, ',')) {
      const size_t equals = part.find('=');
      if (equals == std::string::npos) wrong("FTAR_NET_BACKUP", backups, "write RAIL=BACKUP,... or none");
      const int rail = index(part.substr(0, equals));
      const int backup = index(part.substr(equals + 1));
      if (rail == backup) wrong("FTAR_NET_BACKUP", backups, "the rail " + part.substr(0, equals) + " cannot be its own backup");
      if (chosen[static_cast<size_t>(rail)] >= 0) wrong("FTAR_NET_BACKUP", backups, "two backups for " + part.substr(0, equals));
      chosen[static_cast<size_t>(rail)] = backup;
    }
  }
  std::vector<std::vector<int>> out;
  for (int i = 0; i < n; ++i) {
    std::vector<int> order;
    if (backups != "none") {
      for (int k = 1; k < n; ++k) order.push_back((i + k) % n);
    }
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
      const auto cost = [&](int k) {
        return k == chosen[static_cast<size_t>(i)] ? -1 : distance(rails[static_cast<size_t>(i)], rails[static_cast<size_t>(k)]);
      };
      return cost(a) < cost(b);
    });
    order.insert(order.begin(), i);
    out.push_back(std::move(order));
  }
  return out;
}

std::vector<RailPair> pair_rails(const std::vector<Nic>& ours, const std::vector<int>& order,
                                 const std::vector<Address>& theirs, size_t most) {
  std::vector<int> local(theirs.size(), -1);
  std::vector<int> left = order;
  for (const bool neighbours : {true, false}) {
    for (size_t r = 0; r < theirs.size(); ++r) {
      if (local[r] >= 0) continue;
      const auto it = std::find_if(left.begin(), left.end(), [&](int i) {
        const Nic& nic = ours[static_cast<size_t>(i)];
        if (is_link_local(nic.address) || is_link_local(theirs[r])) {
          // Every NIC is in that network; those of one number are taken for neighbours (handle.h).
          return neighbours && is_link_local(nic.address) && is_link_local(theirs[r]) && scope(theirs[r]) == static_cast<uint32_t>(i) + 1;
        }
        return nic.address.family() == theirs[r].family() && (!neighbours || same_network(nic, theirs[r]));
      });
      if (it == left.end()) continue;
      local[r] = *it;
      left.erase(it);
    }
  }
  std::vector<RailPair> pairs;
  for (size_t r = 0; r < theirs.size() && pairs.size() < most; ++r) {
    if (local[r] >= 0) pairs.push_back({local[r], static_cast<int>(r)});
  }
  return pairs;
}

}  // namespace ftar::nccl
