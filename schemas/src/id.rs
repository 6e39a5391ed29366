//! Typed ids. On every wire an id is a prefix, an underscore and the 32 lower-case hex digits of a UUIDv7 (RFC 9562);
//! in the database it is the bare `uuid`.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use uuid::Uuid;

/// Text that is not an id of the wanted kind.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("`{text}` is not an id of the form {prefix}_<32 hex digits>")]
pub struct IdError {
    pub text: String,
    pub prefix: &'static str,
}

fn parse(text: &str, prefix: &'static str) -> Result<Uuid, IdError> {
    let refuse = || IdError { text: text.chars().take(80).collect(), prefix };
    let digits = text.strip_prefix(prefix).and_then(|rest| rest.strip_prefix('_')).ok_or_else(refuse)?;
    if digits.len() != 32 || digits.bytes().any(|b| !matches!(b, b'0'..=b'9' | b'a'..=b'f')) {
        return Err(refuse());
    }
    Uuid::try_parse(digits).map_err(|_| refuse())
}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(value_type = String))]
        pub struct $name(pub Uuid);

        impl $name {
            pub const PREFIX: &'static str = $prefix;

            /// A new id; ids minted later sort later.
            #[allow(clippy::disallowed_methods, reason = "the one place where ids are minted")]
            pub fn mint() -> Self {
                Self(Uuid::now_v7())
            }

            pub fn uuid(self) -> Uuid {
                self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "_{}"), self.0.as_simple())
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }

        impl FromStr for $name {
            type Err = IdError;

            fn from_str(text: &str) -> Result<Self, IdError> {
                parse(text, $prefix).map(Self)
            }
        }

        impl From<Uuid> for $name {
            fn from(uuid: Uuid) -> Self {
                Self(uuid)
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
            }
        }
    };
}

id!(/** The unit of isolation. */ TenantId, "ten");
id!(/** Who acts: a user, a service or the system actor of a channel. */ PrincipalId, "prn");
id!(/** A bearer token; the id is public, the secret is not. */ TokenId, "tok");
id!(/** A durable agent definition. */ AgentId, "agt");
id!(/** A conversation with one agent. */ SessionId, "ses");
id!(/** One unit of work in a session. */ RunId, "run");
id!(/** One follow-up message to a live run. */ SteerId, "str");
id!(/** One result owed to one target. */ DeliveryId, "dlv");
id!(/** An input file or an output of a run. */ FileId, "fil");
id!(/** A file that comes in parts. */ UploadId, "upl");
id!(/** A configured place that messages come from and results go to. */ ChannelId, "chn");
id!(/** A message as it came in. */ InboundId, "inb");
id!(/** A conversation in a channel. */ ThreadId, "thr");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_round_trips_and_another_prefix_is_refused() {
        let id = RunId::mint();
        assert_eq!(id.to_string().parse::<RunId>(), Ok(id));
        assert!(id.to_string().parse::<SessionId>().is_err());
        for bad in ["", "run_", "run_xyz", "run_0193", &format!("{id}0"), &id.to_string().to_uppercase()] {
            assert!(bad.parse::<RunId>().is_err(), "{bad}");
        }
    }

    #[test]
    fn ids_minted_later_sort_later() {
        let ids: Vec<RunId> = (0..1000).map(|_| RunId::mint()).collect();
        assert!(ids.is_sorted());
    }
}
