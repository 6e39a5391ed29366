//! A DNS server of TXT records, for checks of mail's authors. It says "no such name" to all else.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
};

use anyhow::Result;
use hickory_proto::{
    op::{Message, OpCode, ResponseCode},
    rr::{RData, Record, RecordType, rdata::TXT},
};
use tokio::{net::UdpSocket, task::JoinSet};

/// Bytes of a question over UDP.
const QUESTION_BYTES: usize = 4096;
const TTL_S: u32 = 1;

pub struct Dns {
    pub address: SocketAddr,
    records: Arc<Mutex<Records>>,
    _serving: JoinSet<()>,
}

#[derive(Default)]
struct Records {
    texts: BTreeMap<String, String>,
    mood: Mood,
}

/// How it answers.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub enum Mood {
    #[default]
    Well,
    /// SERVFAIL.
    Broken,
    /// Not at all.
    Mute,
}

impl Dns {
    pub async fn start() -> Result<Self> {
        let socket = UdpSocket::bind("127.0.0.1:0").await?;
        let address = socket.local_addr()?;
        let records: Arc<Mutex<Records>> = Arc::default();
        let own = records.clone();
        let mut serving = JoinSet::new();
        serving.spawn(async move {
            let mut buffer = vec![0; QUESTION_BYTES];
            while let Ok((size, from)) = socket.recv_from(&mut buffer).await {
                let answer = buffer.get(..size).and_then(|question| answer(&own, question));
                if let Some(answer) = answer {
                    // Who asked asks again.
                    socket.send_to(&answer, from).await.ok();
                }
            }
        });
        Ok(Self { address, records, _serving: serving })
    }

    pub fn set(&self, name: &str, text: &str) {
        self.records.lock().unwrap_or_else(PoisonError::into_inner).texts.insert(name.to_lowercase(), text.to_owned());
    }

    pub fn be(&self, mood: Mood) {
        self.records.lock().unwrap_or_else(PoisonError::into_inner).mood = mood;
    }
}

fn answer(records: &Mutex<Records>, question: &[u8]) -> Option<Vec<u8>> {
    let question = Message::from_vec(question).ok()?;
    let query = question.queries.first()?.clone();
    let mut answer = Message::response(question.metadata.id, OpCode::Query);
    let records = records.lock().unwrap_or_else(PoisonError::into_inner);
    if records.mood == Mood::Mute {
        return None;
    }
    let name = query.name().to_ascii().trim_end_matches('.').to_lowercase();
    answer.metadata.response_code = match records.texts.get(&name) {
        _ if records.mood == Mood::Broken => ResponseCode::ServFail,
        Some(text) => {
            if query.query_type() == RecordType::TXT {
                // A string of a TXT record holds 255 bytes.
                let pieces = text.as_bytes().chunks(255).map(|piece| String::from_utf8_lossy(piece).into_owned()).collect();
                answer.add_answer(Record::from_rdata(query.name().clone(), TTL_S, RData::TXT(TXT::new(pieces))));
            }
            ResponseCode::NoError
        }
        None => ResponseCode::NXDomain,
    };
    answer.add_query(query);
    answer.to_vec().ok()
}
