//! Secrets at rest and tokens for sandboxes. Sealing is XChaCha20-Poly1305 (draft-irtf-cfrg-xchacha) under a master key; what is sealed names the key it was sealed
//! with, so keys can be rotated. The place that a secret belongs to is authenticated with it: a sealed value copied to another row does not open.

use chacha20poly1305::{
    Key, KeyInit, XChaCha20Poly1305, XNonce,
    aead::{Aead, Payload},
};
use hmac::{Hmac, KeyInit as _, Mac};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use towpath_schemas::id::RunId;

use crate::{Error, Result, config::Hidden};

const NONCE_BYTES: usize = 24;
const KEY_ID_BYTES: usize = 4;
/// Eight bytes are 2^64 guesses, each of them a whole mail.
const MARK_BYTES: usize = 8;

pub struct Secrets(Vec<MasterKey>);

struct MasterKey {
    id: [u8; KEY_ID_BYTES],
    cipher: XChaCha20Poly1305,
    bytes: [u8; 32],
}

impl Secrets {
    pub fn new(keys: &[Hidden]) -> Result<Self> {
        let wrong = || Error::Config("TOWPATH_MASTER_KEY: one or more keys of 64 hex digits, newest first, separated by commas".to_owned());
        if keys.is_empty() {
            return Err(wrong());
        }
        keys.iter()
            .map(|key| {
                let mut bytes = [0_u8; 32];
                hex::decode_to_slice(&key.0, &mut bytes).map_err(|_| wrong())?;
                let digest = sha256(&bytes);
                let mut id = [0_u8; KEY_ID_BYTES];
                id.copy_from_slice(&digest[..KEY_ID_BYTES]);
                Ok(MasterKey { id, cipher: XChaCha20Poly1305::new(&Key::from(bytes)), bytes })
            })
            .collect::<Result<Vec<_>>>()
            .map(Self)
    }

    /// Seals `secret` for `place`, a name of the row it goes to.
    pub fn seal(&self, place: &str, secret: &[u8]) -> Result<Vec<u8>> {
        let key = &self.0[0];
        let nonce: [u8; NONCE_BYTES] = random()?;
        let sealed = key
            .cipher
            .encrypt(&XNonce::from(nonce), Payload { msg: secret, aad: place.as_bytes() })
            .map_err(|_| Error::broken("a secret could not be sealed"))?;
        Ok([&key.id[..], &nonce[..], &sealed[..]].concat())
    }

    pub fn unseal(&self, place: &str, sealed: &[u8]) -> Result<Vec<u8>> {
        let broken = || Error::broken(format!("the secret of {place} does not open: wrong master key, or it was moved"));
        let (id, rest) = sealed.split_at_checked(KEY_ID_BYTES).ok_or_else(broken)?;
        let (nonce, body) = rest.split_first_chunk::<NONCE_BYTES>().ok_or_else(broken)?;
        let key = self.0.iter().find(|key| key.id == id).ok_or_else(broken)?;
        key.cipher.decrypt(&XNonce::from(*nonce), Payload { msg: body, aad: place.as_bytes() }).map_err(|_| broken())
    }

    /// The token that a sandbox's first hello carries. Derived, so that making it twice makes the same one.
    pub fn sandbox_token(&self, run: RunId, epoch: i32) -> String {
        hex::encode(self.0[0].mac(&sandbox(run, epoch)))
    }

    /// Constant time in the token.
    pub fn is_sandbox_token(&self, run: RunId, epoch: i32, token: &str) -> bool {
        let Ok(given) = hex::decode(token) else { return false };
        self.0.iter().any(|key| bool::from(key.mac(&sandbox(run, epoch)).as_slice().ct_eq(&given)))
    }

    /// Proof that we gave out `what`: eight bytes of an HMAC in hex, short enough for the local part of a mail address.
    pub fn mark(&self, what: &str) -> String {
        self.0[0].short_mark(what)
    }

    /// Constant time in the mark.
    pub fn is_mark(&self, what: &str, mark: &str) -> bool {
        self.0.iter().any(|key| same(key.short_mark(what).as_bytes(), mark.as_bytes()))
    }
}

fn sandbox(run: RunId, epoch: i32) -> String {
    format!("sandbox {run} {epoch}")
}

impl MasterKey {
    fn short_mark(&self, what: &str) -> String {
        hex::encode(&self.mac(&format!("mark {what}"))[..MARK_BYTES])
    }

    fn mac(&self, text: &str) -> Vec<u8> {
        let mut mac = match Hmac::<Sha256>::new_from_slice(&self.bytes) {
            Ok(mac) => mac,
            Err(_) => unreachable!("HMAC takes keys of any length"),
        };
        mac.update(text.as_bytes());
        mac.finalize().into_bytes().to_vec()
    }
}

pub fn sha256(bytes: &[u8]) -> [u8; 32] {
    Sha256::digest(bytes).into()
}

/// Equal, without telling by time where they differ.
pub fn same(a: &[u8], b: &[u8]) -> bool {
    bool::from(a.ct_eq(b))
}

/// Random bytes from the kernel.
pub fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0_u8; N];
    getrandom::fill(&mut bytes).map_err(|error| Error::broken(format!("no random bytes: {error}")))?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secrets(keys: &[&str]) -> Secrets {
        Secrets::new(&keys.iter().map(|key| Hidden(key.repeat(32))).collect::<Vec<_>>()).expect("keys")
    }

    #[test]
    fn a_secret_opens_in_its_own_place_only_and_after_a_rotation() {
        let old = secrets(&["aa"]);
        let sealed = old.seal("run_target 1", b"whsec_x").expect("seal");
        assert!(!sealed.windows(5).any(|w| w == b"whsec"));
        let rotated = secrets(&["bb", "aa"]);
        assert_eq!(rotated.unseal("run_target 1", &sealed).expect("unseal"), b"whsec_x");
        assert!(rotated.unseal("run_target 2", &sealed).is_err());
        assert!(secrets(&["bb"]).unseal("run_target 1", &sealed).is_err());
        for cut in 0..sealed.len() {
            assert!(rotated.unseal("run_target 1", &sealed[..cut]).is_err());
        }
    }

    #[test]
    fn a_sandbox_token_is_good_for_its_run_and_epoch_only() {
        let secrets = secrets(&["aa"]);
        let (run, other) = (RunId::mint(), RunId::mint());
        let token = secrets.sandbox_token(run, 1);
        assert!(secrets.is_sandbox_token(run, 1, &token));
        assert!(!secrets.is_sandbox_token(run, 2, &token));
        assert!(!secrets.is_sandbox_token(other, 1, &token));
        assert!(!secrets.is_sandbox_token(run, 1, ""));
    }
}
