// See route_news.h.
#include "route_news.h"

#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>

namespace ftar {

namespace {
constexpr int kMostReads = 64;  // in one go; what is left is still there at the next

bool about_us(unsigned type) {
  return type == RTM_NEWLINK || type == RTM_DELLINK || type == RTM_NEWADDR || type == RTM_DELADDR || type == NLMSG_OVERRUN;
}
}  // namespace

RouteNews::RouteNews() : fd_(::socket(AF_NETLINK, SOCK_RAW | SOCK_NONBLOCK | SOCK_CLOEXEC, NETLINK_ROUTE)) {
  sockaddr_nl groups{};
  groups.nl_family = AF_NETLINK;
  groups.nl_groups = RTMGRP_LINK | RTMGRP_IPV4_IFADDR | RTMGRP_IPV6_IFADDR;
  if (fd_ < 0) return;
  if (::bind(fd_, reinterpret_cast<const sockaddr*>(&groups), sizeof groups) == 0) return;
  ::close(fd_);
  fd_ = -1;
}

RouteNews::~RouteNews() {
  if (fd_ >= 0) ::close(fd_);
}

bool RouteNews::read() {
  bool news = false;
  for (int i = 0; i < kMostReads; ++i) {
    alignas(nlmsghdr) char bytes[8192];
    const ssize_t n = ::recv(fd_, bytes, sizeof bytes, MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno != ENOBUFS) break;
    if (n < 0) {
      news = true;
      continue;
    }
    auto left = static_cast<unsigned>(n);
    for (const auto* m = reinterpret_cast<const nlmsghdr*>(bytes); NLMSG_OK(m, left); m = NLMSG_NEXT(m, left)) {
      news = news || about_us(m->nlmsg_type);
    }
  }
  return news;
}

}  // namespace ftar
