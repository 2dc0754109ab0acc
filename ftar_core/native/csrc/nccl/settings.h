// The plugin's environment, read once when it starts. A name or value that means nothing is an error: NCCL would run on
// with another setting than its user thinks.
//
//     FTAR_NET_RAILS      which NICs (rails.h); default: all but loopback and the management NIC
//     FTAR_NET_BACKUP     who backs whom (rails.h); default: the nearest
//     FTAR_NET_TIMEOUT_S  all rails or the peer dead for so long: ncclRemoteError; default 30
//     FTAR_NET_OPTIONS    link layer settings, for example mode=stripe,heartbeat_ms=20 (options.h)
//     FTAR_TOKEN_FILE     the job's token; without it the handle carries a secret (handle.h)
#pragma once
#include <string>

#include "../options.h"

namespace ftar::nccl {

struct Settings {
  std::string rails;
  std::string backups;
  std::string token;  // empty: none
  Options options;
};

Settings read_settings();  // throws std::invalid_argument: the variable, the reason, the fix

}  // namespace ftar::nccl
