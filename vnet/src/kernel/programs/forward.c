/* The programs' object: one file per hook. Compiled by `compile` in this folder, loaded by vnetd. */
#include "common.h"
#include "to_wire.h"
#include "translate.h"
#include "from_wire.h"
#include "from_underlay.h"
#include "from_guest.h"
#include "from_lan.h"
#include "from_core.h"

char licence[] SEC("license") = "Dual MIT/GPL";
