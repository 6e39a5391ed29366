//! What is stored, read by the shape that people write. A newer release may have stored more keys, at any depth: here they are passed over, at the door they are refused.

use serde::{
    Deserializer,
    de::{
        DeserializeOwned, IntoDeserializer, Visitor,
        value::{MapDeserializer, SeqDeserializer},
    },
    forward_to_deserialize_any,
};
use serde_json::{Error, Value};

/// Reads a stored value.
pub fn read<T: DeserializeOwned>(value: Value) -> Result<T, Error> {
    T::deserialize(Stored(value))
}

/// A value that shows every struct only the keys that it knows.
struct Stored(Value);

impl<'de> Deserializer<'de> for Stored {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.0 {
            Value::Object(fields) => visitor.visit_map(MapDeserializer::new(fields.into_iter().map(|(key, value)| (key, Stored(value))))),
            Value::Array(items) => visitor.visit_seq(SeqDeserializer::new(items.into_iter().map(Stored))),
            plain @ (Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_)) => plain.deserialize_any(visitor),
        }
    }

    fn deserialize_struct<V: Visitor<'de>>(
        mut self,
        _: &'static str,
        keys: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        if let Value::Object(fields) = &mut self.0 {
            fields.retain(|key, _| keys.contains(&key.as_str()));
        }
        self.deserialize_any(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        if self.0.is_null() { visitor.visit_none() } else { visitor.visit_some(self) }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, _: &'static str, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(self, name: &'static str, words: &'static [&'static str], visitor: V) -> Result<V::Value, Error> {
        self.0.deserialize_enum(name, words, visitor)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct seq tuple tuple_struct map
        identifier ignored_any
    }
}

impl<'de> IntoDeserializer<'de, Error> for Stored {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use towpath_schemas::agent::AgentDefinition;

    use super::*;

    fn definition() -> Value {
        json!({
            "name": "worker", "command": ["/bin/true"], "env": { "of_a_newer_release": "data" }, "mode": "interactive", "terminal": "pipes",
            "sandbox": { "memory_bytes": 1 }, "limits": { "max_s": 5 }, "steering": { "format": "json" },
        })
    }

    #[test]
    fn keys_of_a_newer_release_change_nothing_at_any_depth() {
        let plain: AgentDefinition = serde_json::from_value(definition()).expect("a definition");
        let mut newer = definition();
        for at in ["", "/sandbox", "/limits", "/steering"] {
            newer.pointer_mut(at).expect("an object")["of_a_newer_release"] = json!({ "type": "unheard_of" });
        }
        assert!(serde_json::from_value::<AgentDefinition>(newer.clone()).is_err(), "the door refuses them");
        assert_eq!(read::<AgentDefinition>(newer).expect("stored"), plain);
    }

    #[test]
    fn a_known_key_with_a_value_that_cannot_be_is_an_error_all_the_same() {
        let mut broken = definition();
        broken["limits"]["max_s"] = json!("long");
        assert!(read::<AgentDefinition>(broken).is_err());
    }
}
