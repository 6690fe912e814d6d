// `aesgcm`: authenticated encryption of whatever the stages before it made (docs/formats/aesgcm.md).
#pragma once

#include <memory>

#include "lmcache/object_cipher.h"
#include "lmcache/serde_stage.h"

namespace lmcache {

// Keys may be replaced in the cipher while the stage is used.
std::shared_ptr<const SerdeStage> make_aesgcm_stage(std::shared_ptr<const ObjectCipher> cipher);

}  // namespace lmcache
